"""Uses the loader of monai, over items that are cached and transformed."""

import monai.data
import monai.transforms
import torch
import zoo


def main() -> None:
    torch.manual_seed(3)
    items = [{"image": zoo.image(index).numpy(), "id": index} for index in range(zoo.SAMPLES)]
    steps = monai.transforms.Compose(
        [
            monai.transforms.ScaleIntensityd("image", minv=0.0, maxv=1.0),
            monai.transforms.SpatialPadd("image", (6, 6)),
            monai.transforms.EnsureTyped("image", track_meta=False),
        ]
    )
    data = monai.data.CacheDataset(items, steps, cache_rate=0.5, num_workers=None, progress=False)
    loader = monai.data.DataLoader(data, batch_size=zoo.BATCH_SIZE, shuffle=True, num_workers=2)
    for _ in range(2):
        for batch in loader:
            zoo.took(batch)


if __name__ == "__main__":
    main()
