"""Placement: starts the processes of a run that computes in several, and defines the work of all but the first. The run
itself is `launch`.

    process_group       lets the ranks that a launcher has started find one another; without a launcher, one process
    follower            the ranks other than rank 0: they hold the same models and compute what rank 0 asks for
    ray_supervisor      `supervise`: starts the ranks on a Ray cluster, prints their output, and restarts them
    ray_cluster         the cluster: connects to it, and checks that it has the devices; reports its errors in one line
    rank_group          the ranks of one start: a placement group, and an actor and a process for each rank
    rank_host           the actor: starts the process of a rank on its node, and reports its output and its exit code
    rank_process        the process itself: calls the function of the rank
    rank_lines          merges the lines of all ranks into one text and one file
    engine_group        the servers of `placement.engines`: an actor each, restarted while the run continues
    engine_host         the actor: starts a server on its node
    door                a port of rank 0's node that leads to a server, wherever that was last started
    placed_engine       lets rank 0 find the servers

Ray only places and watches processes: no tensor goes through it, and a rank finds the others by torch.distributed, from
the variables that torchrun also sets. An actor does not compute, so it can see how the process that it started ended.
Imports: `config`, `data`, `engine`, `model`, `train`; torch.distributed and ray only inside functions. Imported by
`launch`, and `api`.
"""
