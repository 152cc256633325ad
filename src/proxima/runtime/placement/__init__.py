"""Placement: the processes of a run that computes in several. The run itself is `launch`; here is who starts them, and
what those beside the first do.

    process_group       the ranks that a launcher has started find one another; alone, one process
    follower            the ranks beside the first: the same models, and whatever rank 0 tells them to compute
    ray_supervisor      `supervise`: starts the ranks on a Ray cluster, prints what they print, and starts them again
    ray_cluster         the cluster: connecting to it, and whether it has the devices; its errors as one line
    rank_group          the ranks of one start: a placement group, an actor and a process each
    rank_host           the actor: starts the process of a rank on its node, and passes on its lines and its end
    rank_process        the process itself: calls the function of the rank
    rank_lines          the lines of all ranks as one text, and in one file
    engine_group        the servers of `placement.engines`: an actor each, restarted while the run continues
    engine_host         the actor: starts a server on its node
    door                a port of rank 0's node that leads to a server, wherever it was started last
    placed_engine       how rank 0 finds these

Ray places and watches, nothing more: no tensor goes through it, and a rank finds the others by torch.distributed, from
the variables that torchrun sets too. An actor computes nothing, so it sees how the process beside it ended.
Imports: `config`, `data`, `engine`, `model`, `train`; torch.distributed and ray only inside functions. Imported by
`launch`, and `api`.
"""
