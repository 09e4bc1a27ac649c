"""/opt/ml of a host, as SageMaker lays it out."""

import json


def lay_out_ml(base, config, *, channels, hyperparameters=None) -> None:
    """Makes /opt/ml as SageMaker does, with the files that say what the job is."""
    for name in ("input/config", "input/data", "model", "output/data"):
        (base / name).mkdir(parents=True, exist_ok=True)
    channel = {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    }
    documents = {
        "resourceconfig": config,
        "hyperparameters": json.dumps(hyperparameters or {}),
        "inputdataconfig": json.dumps(dict.fromkeys(channels, channel)),
    }
    for name, text in documents.items():
        (base / "input" / "config" / f"{name}.json").write_text(text)


def resource_config(host, groups, *, interface="lo", kinds=None) -> str:
    kind_of = {name: (kinds or {}).get(name, "ml.c5.xlarge") for name in groups}
    group = next(name for name, hosts in groups.items() if host in hosts)
    return json.dumps(
        {
            "current_host": host,
            "current_instance_type": kind_of[group],
            "current_group_name": group,
            "hosts": sorted(h for hosts in groups.values() for h in hosts),
            "instance_groups": [
                {"instance_group_name": name, "instance_type": kind_of[name], "hosts": list(hosts)}
                for name, hosts in groups.items()
            ],
            "network_interface_name": interface,
        }
    )
