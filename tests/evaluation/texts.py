"""What the run of these tests was trained and validated on."""

TRAINING_TEXT = "tomorrow and tomorrow and tomorrow " * 4
VALIDATION_TEXTS = ["creeps in this petty pace – from day to day " * 9, "to the last syllable of recorded time\n" * 8]
