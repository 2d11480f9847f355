"""Print the verdict of every health run under a folder: python judge.py RUNS"""

import sys

from meshwise import store
from meshwise.pages import health

for run_dir in store.runs_of(sys.argv[1], "measure-health"):
    info, samples, _ = store.load(run_dir)
    found = health.findings(info, samples)
    print(info.run_id.split("health-")[1], health.verdict(found), sep=": ")
    for one in found:
        print("   ", one.severity, one.what, one.where, one.evidence, sep=" | ")
