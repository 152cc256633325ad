"""Placement: starts the processes of a run that computes in several, and defines the work of all but the first. The run
itself is `launch`.

    launcher            what torchrun, srun or Ray has set for this process: whether it is a rank, and which one
    rendezvous          how the ranks meet, agree and form a process group; without a launcher, there is one process
    rank_messages       what the other ranks send to rank 0: signs of life, lines, errors
    rank_listener       the port where rank 0 awaits the others, open to strangers
    rank_watch        rank 0's thread that hears the other ranks: deaths, errors, lines, stalls
    follower            the ranks other than rank 0: they hold the same models and take part in what rank 0 does

On a Ray cluster, the launcher is ours. What runs below it is what torchrun would run:

    ray_supervisor      starts the ranks of a command with the variables that torchrun would set, prints their output,
                        and restarts them
    ray_cluster         the cluster: connects to it, checks and reserves its devices, starts actors on them, such as
                        those of `placement.reward_workers`; reports its errors in one line
    node_actors         the actors on the nodes: one starts the process of a rank, one a server
    engine_group        the servers of `placement.engines`, restarted while the run continues

Ray only places and watches processes: no tensor goes through it, and a rank finds the others by torch.distributed. An
actor does not compute, so it can see how the process that it started ended.
Imports: `config`, `data`, `engine`, `model`, `reward`, `training`, the end of a run from `loop`; ray only inside
functions. Imported by `launch`, and `api`.
"""
