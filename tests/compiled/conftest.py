from ..plan.conftest import model, plan, store, x  # noqa: F401
from ..transforms.conftest import cpu, gpu  # noqa: F401
