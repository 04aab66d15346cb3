from ..plan.conftest import key, model, path, plan, store, x  # noqa: F401
