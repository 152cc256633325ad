"""A stand-in for the library NeMo Gym: as much of it as `foreign_runner` uses."""
