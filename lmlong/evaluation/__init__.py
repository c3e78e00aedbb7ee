"""How well trained models predict text, against how far back they may look; as numbers, tables and plots."""
