"""Recording CUDA graphs: whole training steps."""
