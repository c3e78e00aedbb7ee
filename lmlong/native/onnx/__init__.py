"""Models as graphs of ONNX: each module builds its part."""
