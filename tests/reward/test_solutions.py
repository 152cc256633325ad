"""No hostile solution passes a test, and each honest one does, in every sandbox."""



from tests.containers import podman as podman

HERE = "tests/reward/test_solutions.py"
SECONDS, MEMORY_MB = 4.0, 1024
