from ..transforms.conftest import cpu, gpu  # noqa: F401
