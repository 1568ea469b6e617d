def available() -> tuple[bool, str]:
    """Whether libcuda can be loaded, with the reason when it cannot. Makes no CUDA call."""
