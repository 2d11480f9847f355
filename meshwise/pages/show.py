"""Any of our records as tables."""

from meshwise.pages import health, kept, ran, samples, tables, trace
from meshwise.pages.steps import result
from meshwise.pages.table import Table
from meshwise.spec import Cluster, Costs, Plan, Record, RunInfo, Sample
from meshwise.spec.checkpoint import Verified
from meshwise.spec.phases import Phases
from meshwise.spec.trace import TraceCheck


class Run(Record, kw_only=True):
    """A run directory as one document."""

    info: RunInfo
    samples: tuple[Sample, ...]


Shown = Cluster | Costs | Plan | Run | Phases | TraceCheck | Verified


def of(record: Shown) -> list[Table]:
    """The tables that tell what the record holds."""
    if isinstance(record, Verified):
        return kept.checkpoint(record)
    if isinstance(record, Phases):
        return [kept.phases(record)]
    if isinstance(record, TraceCheck):
        return [trace.table(record, "Plan against trace")]
    if isinstance(record, Cluster):
        return tables.cluster(record)
    if isinstance(record, Costs):
        return tables.costs(record)
    if isinstance(record, Plan):
        return tables.plan(record)
    if "-measure-health-" in record.info.run_id:  # nothing else tells it apart
        state = samples.state(record.info, record.samples)
        return [state, *health.tables(record.info, record.samples)]
    if record.info.plan is None:
        return samples.run(record.info, record.samples)
    found = result(record.info, list(record.samples))
    return [samples.state(record.info, record.samples), *ran.steps([found])]
