"""The fields of SkyPilot's, Kubeflow's and JobSet's files that are written here, as their public sources have them.

- SkyPilot: `sky/utils/schemas.py` of skypilot-org/skypilot, get_task_schema and _get_single_resources_schema; names of
  clusters by `CLUSTER_NAME_VALID_REGEX` of `sky/skylet/constants.py`.
- TrainJob: `pkg/apis/trainer/v1alpha1/trainjob_types.go` of kubeflow/trainer and its rules of validation.
- JobSet: `api/jobset/v1alpha2/jobset_types.go` of kubernetes-sigs/jobset; pods are those of Kubernetes' core/v1 and
  jobs of batch/v1, as the API's reference lists their fields.

All else is refused, as their servers and `kubectl --validate=strict` refuse it.
"""

from typing import Any


def _fields(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _list(of: dict[str, Any], most: int = 128) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1, "maxItems": most}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_ARGUMENTS = _list({"type": "string", "maxLength": 65536})
_ENVIRONMENT = _list(
    _fields(("name", "value"), name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}, value=_TEXT)
)
_LIMITS = _fields(
    ("limits",),
    limits={
        "type": "object",
        "propertyNames": {"pattern": "^(nvidia|amd)\\.com/gpu$"},
        "additionalProperties": _COUNT,
        "minProperties": 1,
    },
)
_METADATA = _fields(("name",), name=_LABEL)

SKYPILOT = _fields(
    name={"type": "string", "pattern": "^[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?$"},
    num_nodes=_COUNT,
    workdir=_TEXT,
    resources=_fields(
        accelerators={"type": "string", "pattern": "^[A-Za-z0-9-]+:[1-9][0-9]*$"},
        use_spot={"type": "boolean"},
        network_tier={"enum": ["standard", "best"]},
    ),
    envs={
        "type": "object",
        "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": {"type": ["string", "number", "null"]}},
        "additionalProperties": False,
    },
    run=_TEXT,
)
TRAIN_JOB = _fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=_METADATA,
    spec=_fields(
        ("runtimeRef",),
        runtimeRef=_fields(("name",), name={"type": "string", "minLength": 1, "maxLength": 253}),
        trainer=_fields(
            image={"type": "string", "maxLength": 500},
            command=_ARGUMENTS,
            args=_ARGUMENTS,
            env=_ENVIRONMENT,
            numNodes=_COUNT,
            numProcPerNode=_COUNT,
            resourcesPerNode=_LIMITS,
        ),
    ),
)
_CONTAINER = _fields(
    ("name", "image"),
    name=_LABEL,
    image=_TEXT,
    command=_ARGUMENTS,
    args=_ARGUMENTS,
    env=_ENVIRONMENT,
    resources=_LIMITS,
    volumeMounts=_list(_fields(("name", "mountPath"), name=_LABEL, mountPath=_TEXT)),
)
_POD = _fields(
    ("containers", "restartPolicy"),
    restartPolicy={"enum": ["Never", "OnFailure"]},
    nodeSelector={
        "type": "object",
        "additionalProperties": {
            "type": "string",
            "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
            "maxLength": 63,
        },
    },
    containers=_list(_CONTAINER),
    volumes=_list(_fields(("name",), name=_LABEL, emptyDir=_fields(medium={"enum": ["", "Memory"]}))),
)
_JOB = _fields(
    ("template",),
    parallelism=_COUNT,
    completions=_COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit={"type": "integer", "minimum": 0},
    template=_fields(("spec",), spec=_POD),
)
JOB_SET = _fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_METADATA,
    spec=_fields(
        failurePolicy=_fields(maxRestarts={"type": "integer", "minimum": 0}),
        replicatedJobs=_list(
            _fields(("name", "template"), name=_LABEL, replicas=_COUNT, template=_fields(("spec",), spec=_JOB))
        ),
    ),
)
SCHEMAS = {"skypilot.yaml": SKYPILOT, "trainjob.yaml": TRAIN_JOB, "jobset.yaml": JOB_SET}
