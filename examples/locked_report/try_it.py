"""Asks for five reports of one customer and one of another, and checks that the five did not overlap."""

import itertools

from examples.locked_report.app import report

ACME, GLOBEX = "acme", "globex"

results = [report.delay(customer) for customer in (ACME, ACME, ACME, GLOBEX, ACME, ACME)]
reports = sorted((result.get(timeout=120) for result in results), key=lambda one: one["began"])

start = reports[0]["began"]
for one in reports:
    print(f"{one['customer']:8}{one['began'] - start:6.1f} s to {one['ended'] - start:4.1f} s   fence {one['fence']}")

acme = [one for one in reports if one["customer"] == ACME]
globex = [one for one in reports if one["customer"] == GLOBEX]
for before, after in itertools.pairwise(acme):
    assert before["ended"] <= after["began"], "two reports of one customer overlapped"
    assert before["fence"] < after["fence"], "a later holder has a higher fence"
print(f"{len(acme)} reports of {ACME}, one at a time; {len(globex)} of {GLOBEX} beside them")
