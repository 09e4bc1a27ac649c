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

The four rooms, `trainer`, `agent`, `workers` and `wire`, have a map in their own docstrings. The
modules beside this one by the question that brings you here; the first of each is where to begin:

| question | module | what it answers |
| --- | --- | --- |
| How do batches get to a script? | `placement` | where a loader's batches are made, and why |
| | `loader` | `stoker.DataLoader` |
| | `replace` | the same under torch's class, for scripts that are not changed |
| | `remote` | datasets that are built on the data hosts alone |
| | `timed` | batches of anything else, which are only timed |
| | `device`, `transfer` | copies of batches to the device that trains, in few transfers |
| Which iterator is it? | `iterators` | torch's own, numbered and seeded; what the others share |
| | `remote_iterators` | data hosts make the batches |
| | `in_step` | no workers in the script: when may a batch be made ahead of the loop? |
| | `planned_workers` | no workers in the script, but a plan says how many |
| | `watched_workers` | workers whose deaths and hangs `feed.on_error` survives |
| | `numbered_workers` | torch's workers, for the rest of an epoch |
| What is asked of the sampler? | `sampler` | indices, counted and drawn as torch would |
| | `global_draws` | does it draw from the process's generators, index by index? |
| | `sample_index` | an index as people read it |
| | `balance` | samples of a global batch, dealt to the ranks by what they cost |
| | `balance_figures` | what dealing has changed, for the log and `training.json` |
| Can data hosts make it? | `changes` | does the script change the dataset between two batches? |
| | `reachable` | what objects refer to, read without running their code |
| | `open_files` | would forked workers share an open file? |
| | `short_loaders` | does the loader live too short for a data host's start? |
| | `foreign_loaders` | loaders of other libraries, which make batches themselves |
| | `why_unfed` | the sentences of all causes |
| | `unfed` | does a training run take no batches from its data hosts at all? |
| Which random numbers? | `seeding` | seeds a batch, a stretch of samples or a sample |
| | `stretches` | neighbouring samples that have one seed |
| | `generators` | the generators that a dataset holds |
| | `module_generators` | those among the globals of modules |
| | `drawn_generators` | which of them a dataset draws from: only these are seeded |
| | `random_states` | the global states of Python, NumPy and torch |
| What is in a state? | `loader_state` | how an epoch began and how far it is; replays a sampler |
| | `bookkeeping` | a process's books: settings, timeline, each loader's progress |
| | `stream_progress` | how far an iterable dataset is, shard by shard |
| | `rank_streams` | a state of another number of ranks |
| | `kept_values` | what a dataset keeps in itself from epoch to epoch |
| | `shared_places` | which places of a dataset have one and the same list or array |
| | `plain_values`, `value_objects` | which values another process can be given |
| | `code_values` | what it keeps in globals and default arguments |
| | `shared_values`, `stream_epochs` | counts in memory that workers share; Hugging Face's epochs |
| | `compared_values` | what it changes that no state has |
| | `stream_changes` | what an epoch on a data host changes in the script's object |
| What follows a bad sample? | `tolerance` | `feed.on_error`: it is skipped or replaced |
| | `bad_samples` | the list of them, and when they are too many |
| | `doubts` | did it fail by itself, or by what failed before it? |
| | `lost_samples` | what a worker is told of a sample that ended or blocked an earlier one |
| | `mismatched_samples` | samples that cannot be collated with the others of a batch |
| | `left_behind`, `process_state` | what a sample leaves changed in its process |
| How much memory? | `memory` | bytes of batches, and how many bytes may wait |
| | `memory_guard` | fewer batches wait before the kernel kills a process |
| What is measured? | `timeline` | a row per step: how long it waited, and computed |
| | `epoch_times`, `training_steps` | whole epochs; whose steps are the training run's |
| | `device_events` | when the device reached a step |
| | `resource_usage` | CPU and bytes of a trainer, by loader |
| | `metrics` | what a script reports by `stoker.log_metrics` |
| | `rank_reports` | files in which ranks tell the launcher their steps and loaders |
| Which process is this? | `data_worker` | does it make batches for a loader of another process? |
| | `started_ranks` | the rank, where a script starts its ranks itself |
| | `abandoned_workers` | torch's workers that nobody tells to end |
| | `interrupts` | was an error raised by a signal's handler? |
"""
