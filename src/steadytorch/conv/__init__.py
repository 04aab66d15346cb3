"""cuDNN convolution engines: list them, choose by measurement, store by name, and run them."""
