from tests.cli.conftest import here, proxima

__all__ = ["here", "proxima"]  # fixtures
