"""The feed's engine: workers that make batches, each with its own sealed connection to a loader.

Three processes. The *trainer* is a rank of the training. The *agent* runs on a data host: it starts
processes and hands sockets over. A *worker* makes batches for one loader of one rank.

The way of a batch:

1. `iter(loader)`: the trainer pickles dataset and collate_fn by value (`loader_spec`).
2. The trainer opens a session at each agent, over the control connection, and sends the pickle to
   those that lack its digest.
3. The agent has a *loader process* unpickle it once (`loader_process`), and gives the trainer a
   ticket and a key for each worker.
4. The trainer dials the agent's batch port and sends the ticket; the agent passes the socket to the
   loader process, which forks a worker for it.
5. The scheduler gives the oldest numbers within the window to workers with fewer than two orders.
6. The worker (`worker`) seeds, makes samples, collates, and encodes the batch (`codec`): a pickle,
   and the memory of its tensors and arrays. Its sending thread seals it (`records`) and sends it
   (`batch_socket`).
7. A receiving thread of the trainer decrypts into the batch's own block, decodes it as views, and
   sends that worker its next order.
8. `next(loader)` takes the batch at the head of the line.

A connection that ends is a lost worker, whatever ended it; its numbers go to others.
"""
