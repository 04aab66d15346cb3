from ..transforms.conftest import conv_workload, cpu  # noqa: F401
