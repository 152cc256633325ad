"""Placement: starts the processes of a run that computes in several, and defines the work of all but the first. The run
itself is `launch`.

    process_group       lets the ranks that a launcher has started find one another; without a launcher, one process
    slurm               a task of `srun` as one of these ranks
    meeting             how they do: the store of the launcher, the checks that they agree (`agreement`), the group
    rank_listener       the port where rank 0 awaits the others, open to strangers
    rank_watch          rank 0's thread that hears the other ranks (`lifeline`): deaths, errors, lines, stalls
    follower            the ranks other than rank 0: they hold the same models and take part in what rank 0 does

On a Ray cluster, the launcher is ours. What runs below it is what torchrun would run:

    ray_supervisor      starts the ranks of a command, prints their output, and restarts them
    ray_cluster         the cluster: connects to it, checks and reserves its devices, starts actors on them; reports its
                        errors in one line
    rank_group          the ranks of one start, with the variables that torchrun would set
    node_actors         the actors on the nodes: one starts the process of a rank (`rank_process`), one a server
    engine_group        the servers of `placement.engines`, restarted while the run continues
    placed_engine       lets rank 0 find the servers
    reward_actors       the actors of `placement.reward_workers`

Ray only places and watches processes: no tensor goes through it, and a rank finds the others by torch.distributed. An
actor does not compute, so it can see how the process that it started ended.
Imports: `config`, `data`, `engine`, `model`, `train`; `meeting`, and with it torch.distributed, only where there are
several ranks, and ray only inside functions. Imported by `launch`, and `api`.
"""
