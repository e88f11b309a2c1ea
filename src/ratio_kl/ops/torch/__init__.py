"""The torch backend: chunked eager PyTorch, on any device and in float64 too."""
