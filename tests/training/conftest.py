from ..verification.conftest import process_settings  # noqa: F401
