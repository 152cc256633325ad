"""Views: the display of runs, while they run (`run_views.RunViews`) and afterwards (`report`, `comparison_page`).

    run_views.py      all observers of a run, its terminal lines, and the warnings about a step
    log_lines.py      a run as lines (`episode_lines` an episode)      trackers/            wandb, trackio and others
    microscope/       the viewer, `proxima view`                       page.py              its exports, from templates
    report.py         report.html, an export of a run (with `report_samples`)
    comparison_page.py  compare.html, of several runs                  comparison_files.py  or a figure, or a table
    sweep_progress.py a running sweep                                  terminal.py          tables, progress line
    eval_tables.py    an evaluation                                    formatting.py        numbers and foreign text
    chart.py          figures, by matplotlib, and their colours        *_plot.py, *_plots.py  those of `proxima plot`
A view only reads and makes no decisions. What shows a run is an observer (`runtime.watch.observer`); the report needs
only the run folder, even of an unfinished run. `formatting` formats every number; text from a model or a data set is
escaped for the terminal (`printable`) or for the browser.
Imports: rich, jinja2, matplotlib (for figures alone), `core`, `rollout`, `config`, `evaluation`, `runtime`,
`experiments`. Imported by `api` and `cli`.
To add one: a subclass of `Observer`, created by `RunViews`. A curve of the report
is a metric of metrics.jsonl; metrics.yaml has its meaning. To add a figure: a subclass of `chart.Drawing`. To add a
warning: a function in `RULES` of `run_views`.
"""
