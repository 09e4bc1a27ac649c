"""Uses the loader of torch-geometric, which makes one graph of many."""

import torch
import zoo
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader


def graph(index: int) -> Data:
    nodes = 3 + index % 5
    ring = torch.arange(nodes)
    edges = torch.stack([ring, ring.roll(1)])
    return Data(x=zoo.image(index).flatten()[:nodes, None], edge_index=edges, y=index)


def main() -> None:
    torch.manual_seed(3)
    graphs = [graph(index) for index in range(zoo.SAMPLES)]
    loader = DataLoader(graphs, batch_size=zoo.BATCH_SIZE, shuffle=True, num_workers=2)
    for _ in range(2):
        for batch in loader:
            assert batch.num_graphs == zoo.BATCH_SIZE
            zoo.took({**batch.to_dict(), "batch": batch.batch, "ptr": batch.ptr})


if __name__ == "__main__":
    main()
