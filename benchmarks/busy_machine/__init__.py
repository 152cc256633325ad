"""How fast a run is beside other work, by how long its OpenMP threads spin while they wait for each other."""
