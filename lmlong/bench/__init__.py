"""Time and memory: attentions, models and Linformer, measured in turns on one machine."""
