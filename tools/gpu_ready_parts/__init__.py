"""The parts of tools/gpu_ready."""
