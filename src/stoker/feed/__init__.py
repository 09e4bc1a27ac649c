"""The feed: batches from local workers and from the data group, in one order.

The way of a batch, from the script's `next` and back:

| what happens | where |
| --- | --- |
| `stoker.DataLoader`, or torch's with one method replaced: an iterator | `loader`, `replace` |
| it is decided where the loader's batches are made, and said why | `placement` |
| the iterator draws as torch does, and counts | `iterators`, `bookkeeping` |
| a source makes the batches: torch's workers, the trainer's process | `local_sources` |
| or data hosts; their first batch, and what fails there, is tried here | `fed_source`, `trial` |
| workers make them and send them, sealed | `engine` has that way step by step |
| a batch is seeded, and generators that are found | `seeding`, `generators` |
| a bad sample is skipped, replaced, listed | `tolerance`, `bad_samples` |
| a loader's state is asked for, or resumed; shards of streams | `loader_state`, `streams` |
| the next batch is copied to the device | `device` |

What is measured: `timeline` has a row per step, `step_times` says whose steps are the
training's, and adds whole epochs, `device_events` asks the device. `timed` does it for
batches of anything else, and keeps what a script reports. `rank_reports` says why data hosts made
no batch; `memory` bounds what waits.
`remote` has datasets that are built on data hosts alone. Which process this is, and loaders of
other libraries: `foreign_loaders`.
"""
