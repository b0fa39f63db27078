//! `foretell target`: an OpenAI server over an ONNX model.
