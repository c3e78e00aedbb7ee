"""The parts of tools/gpu_report."""
