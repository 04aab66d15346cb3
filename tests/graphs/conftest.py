from ..transforms.conftest import gpu  # noqa: F401
