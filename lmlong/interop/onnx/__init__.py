"""Our models as graphs of ONNX, for onnxruntime."""
