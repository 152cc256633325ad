"""Views: the display of runs, live (`run_views.RunViews`) and afterwards (`report`, `comparison_page`).

    run_views.py                all observers of a run                 diagnostics.py       warnings about a step
    log_lines.py, live.py       a run as lines, and on a terminal      trackers/            wandb, trackio and others
    report*.py                  report.html                            comparison_page.py   compare.html
    simulation_, scale_page.py  the pages of `simulate`                sweep_progress.py    a running sweep
    eval_tables.py              an evaluation                          terminal.py          tables, progress line
    chart.py                    all charts, by matplotlib              page.py              HTML pages from one template
    curve.py, *_plot.py         figures of `proxima plot`              formatting.py        numbers and foreign text
A view only reads and makes no decisions. Live views are observers (`runtime.watch.observer`); report and curve need
only the run folder, even of an unfinished run. `formatting` formats every number; text from a model or a data set is
escaped for the terminal (`printable`) or for the browser.
Imports: rich, jinja2, matplotlib, `core`, `rollout`, `config`, `evaluate`, `runtime`, `lab`. Imported by `api` and
`cli`.
To add a live view: a subclass of `Observer`, chosen in `screen` or `RunViews` of `run_views.py`. To add a curve to the
report: an entry in `CURVES` of `report_specs`. To add a figure: a subclass of `chart.Drawing`. To add a warning: a
function in `RULES` of `diagnostics`.
"""
