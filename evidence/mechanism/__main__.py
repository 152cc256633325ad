"""Run, or continue, the experiment and report: `make evidence CLAIM=mechanism`."""

from evidence.mechanism import run, summary

run.main()
summary.main()
