"""The feed: batches from local workers and from the data group, in one order.

The way of a batch, from the script's `next` and back:

| where | what happens |
| --- | --- |
| trainer | `replace` or `loader` put `iterators` and `remote_iterators` under torch's loader |
| trainer | `placement` decides whether data hosts help; `seeding` gives a batch its seed |
| trainer | `trainer/session` numbers it, `trainer/scheduler` chooses the host that is asked |
| data host | `agent/agent` takes the request, `agent/dispatch` orders those of all trainers |
| data host | `workers/pool` gives it to a `workers/worker`, whose result `wire/codec` encodes |
| data host | `agent/batch_port` sends it, encrypted by `wire/sealing` |
| trainer | `trainer/receiver` reads it, `trainer/answers` hands it to the session |

`wire/protocol` has a table of all messages on this way. `timeline` notes how long the script waited
for a batch, and computed with it.
"""
