"""A training run as its options describe it: the command line, TOML files, ``run.json`` and the repeat command.

A :class:`RunSpec` is plain values; from them come the data (loaded or scanned), the objective, the algorithm and
the budget, the same in ``train``, ``resume``, ``demo``, ``frontier`` and ``federate simulate``. It is written to
``run.json`` before anything is released, so that a run can be resumed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import secrets
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

from scipy import sparse
from typer import Argument, BadParameter, Option

from quietgrad import data as datasets
from quietgrad.cli.options import Delta, RelationName, budget, class_labels, usage
from quietgrad.cli.scanned_data import open_scan
from quietgrad.core.accounting.budget import DEFAULT_RELATION, Budget
from quietgrad.core.errors import DataError, SettingError
from quietgrad.core.files import is_multi_file, read_json, write_atomically
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.state import LONGEST, check_account_name
from quietgrad.core.sampling import SamplingName
from quietgrad.core.session.opening import Terms
from quietgrad.core.settings import field_values, fields_of
from quietgrad.data.address import Address, is_address, public
from quietgrad.data.dataset import Dataset, check_task
from quietgrad.data.schema import without_comments
from quietgrad.estimators.holdout import hold_out_records, hopeless_score
from quietgrad.methods.base import Algorithm
from quietgrad.methods.budget_allocation import for_table
from quietgrad.methods.oracles.gradient_estimators import ORACLES, oracle_class
from quietgrad.methods.registry import entry
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.privacy_units import PersonRule
from quietgrad.tables.registry import make_objective, usual_loss

RUN_FILE = "run.json"
Options: TypeAlias = Mapping[str, Any]  # by name, as a file or a command line has them
_PATHS = ("schema", "test", "ledger")
_LISTS = ("settings", "drop", "classes")
_READING = (
    "schema", "label", "classes", "task", "n_features", "person", "drop", "keep", "delimiter", "encoding",
)  # fmt: skip
_FLAGS = ("steps", "batch_size", "learning_rate", "clip", "gamma", "sampling")
_BY_HAND = (
    "algorithm", "objective", "regularizer", "test", *_FLAGS, "settings", "rows", "evaluate_train",
    "checkpoint_seconds",
)  # fmt: skip
_FLAG_NAMES = {"settings": "--set", "intercept": "--no-intercept"}
_LOOSE = Budget(16.0, 1e-5)
_NOISELESS_STEPS = 128  # the default's 32, with the momentum of a run without noise, end in the midst of a swing
_FULL_BATCH = {"steps": 50, "learning_rate": 1.0, "clip": 1.5, "momentum": 0.5}


def _option(default: object, help: str, *flags: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(*flags, help=help, **more)})


@dataclass(frozen=True)
class RunSpec:
    """The options of ``quietgrad train``, on the command line, in a TOML file and in ``run.json`` alike."""

    data: str | None = field(
        default=None,
        metadata={
            "option": Argument(
                help="A LIBSVM, CSV, npz or parquet file, or a registered name; a folder or pattern such as "
                "'people/*.parquet' is scanned and never loaded whole; without it, the demo's.",
                parser=public,
            )
        },
    )
    epsilon: float | None = _option(None, "Privacy budget ε; smaller is more private.")
    delta: Delta = 1e-5
    relation: RelationName = DEFAULT_RELATION
    model: str | None = _option(
        None, "linear, additive, svc, least-squares, poisson or quantile[:Q]; else linear by --algorithm."
    )
    inference: bool = _option(
        False, "Also release standard errors of the coefficients (linear models).", "--inference"
    )
    features: str | None = _option(
        None, "Public features of each row: scattering (of pictures), FILE.onnx or FILE.onnx@sha256:DIGEST."
    )
    class_weight: str | None = _option(None, "Weights of the classes, such as no=1,yes=5.")
    holdout: float | None = _option(None, "Share of the records to hold out for a private score, such as 0.2.")
    score_share: float = _option(0.2, "Share of ε and δ for the private score of the held-out records.")
    exact_score: bool = _option(
        False, "Score held-out records without noise. NOT private: keep it to yourself.", "--exact-score"
    )
    drop: list[str] | None = _option(None, "Leave this column out; may be repeated.")  # noqa: RUF009
    keep: str | None = _option(None, "Column of ids: no feature, kept beside predictions.")
    delimiter: str | None = _option(None, "Delimiter of a text file: , ; or a tab.")
    encoding: str | None = _option(None, "Encoding of a text file, such as cp1252.")
    algorithm: str | None = _option(
        None, "Such as dp-srm; see `quietgrad plan --list`. The default suits linear models."
    )
    steps: int | None = _option(None, "Number of steps.")
    batch_size: int | None = _option(None, "(Expected) records per step.")
    learning_rate: str | None = _option(None, "A number or a schedule such as cosine:0.5.")
    clip: float | None = _option(None, "L2 bound on one record's gradient.")
    gamma: float | None = _option(None, "DP-SRM: weight of the fresh gradient.")
    sampling: str | None = _option(None, f"How records enter a step: {', '.join(get_args(SamplingName))}.")
    settings: list[str] | None = _option(  # noqa: RUF009
        None, "Any other setting of the algorithm, as KEY=VALUE; may be repeated.", "--set"
    )
    objective: str | None = _option(
        None, "logistic, multinomial, huber[:T], squared, hinge[:H]; by default as the labels say."
    )
    regularizer: str | None = _option(None, "l2:STRENGTH or nonconvex:STRENGTH.")
    intercept: bool = _option(True, "Whether to fit a constant term.")
    row_bound: float | None = _option(None, "Public bound on the norm of a row.")
    rows: str = _option("clip", "clip shortens rows above the bound; normalize brings every row to it.")
    test: str | None = _option(
        None, "Held-out records in a file of the same kind; their score is private, too.", parser=public
    )
    schema: str | None = _option(None, "Public schema of a CSV or parquet file.")
    label: str | None = _option(None, "Label column; else the last.", "--label", "--target")
    classes: str | None = _option(None, "Public class labels, such as no,yes.")
    task: str | None = _option(None, "binary, multiclass or regression.")
    n_features: int | None = _option(None, "Public number of features (LIBSVM).")
    n_public: int | None = _option(
        None, "Public number of records. Under add-remove they are counted privately without it, with 1 % of ε."
    )
    person: str | None = _option(None, "Column of person ids: ε then holds per person, and n counts people.")
    combine: str = _option("mean", "A person counts with the mean or the sum of their rows.")
    records_per_person: int | None = _option(None, "Largest number of a person's rows used in one release.")
    ledger: str | None = _option(None, "Ledger file; else the project's own.")
    records_public: int | None = _option(None, "Number of rows of all people together, if that is public.")
    account: str | None = _option(
        None, "Ledger account to charge: a name for the people in the data; else the file's name."
    )
    cap_epsilon: float | None = _option(None, "Refuse if the account would exceed this ε.")
    evaluate_train: bool = _option(
        False, "Score the private training records too, without noise.", "--evaluate-train"
    )
    non_private: bool = _option(False, "No noise: NOT PRIVATE.", "--non-private")
    checkpoint_seconds: float = _option(10.0, "Least seconds between two checkpoints.")
    cluster: str | None = _option(None, "Sum on a Dask cluster: local, or a scheduler such as tcp://HOST:8786.")
    memory: int | None = _option(None, "Memory for a scan in MB (400 for folders and patterns).")
    threads: int | None = _option(None, "Cores for a scan; else all.")
    allow_http: bool = _option(
        False, "Read an address of plain http, which others can read and change on the way.", "--allow-http"
    )
    split_key: str | None = None
    """Under which records are held out; no option, each run draws its own."""

    def __post_init__(self) -> None:
        for name in ("data", *_PATHS):  # whatever is made of a run's options shows no login
            object.__setattr__(self, name, public(getattr(self, name)))

    @classmethod
    def from_options(cls, **values: Any) -> RunSpec:
        """The run that the options describe; the same from wherever it is resumed, so files get their full path."""
        check_task(values.get("task"))
        if isinstance(values.get("classes"), str):
            values["classes"] = class_labels(values["classes"])
        values |= {name: list(values[name]) or None for name in _LISTS if values.get(name) is not None}
        given = {name: values[name] for name in _PATHS if values.get(name) is not None}
        values |= {name: str(Path(path).resolve()) for name, path in given.items() if not is_address(path)}
        if values.get("features") not in (None, "scattering"):
            values["features"] = str(Path(values["features"]).resolve())
        data = values.get("data")
        if data is not None and not is_address(data) and (Path(data).is_file() or is_multi_file(data)):
            values["data"] = str(Path(data).absolute())
        if values.get("holdout") is not None:
            values["split_key"] = secrets.token_hex(16)
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        """The run that a TOML file or the ``run.json`` of another run describes."""
        values = tomllib.loads(path.read_text("utf-8")) if path.suffix == ".toml" else read_json(path)
        return cls.from_options(**_flat(path, values) | {"split_key": None})  # a run of its own splits anew

    @classmethod
    def load(cls, folder: Path) -> RunSpec:
        """Read the options that a run was started with."""
        try:
            return cls(**_flat(folder / RUN_FILE, read_json(folder / RUN_FILE)))
        except FileNotFoundError:
            raise DataError(f"{folder}: no run was started here ({RUN_FILE} is missing).") from None
        except DataError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(f"{folder / RUN_FILE}: cannot be read as the options of a run.") from None

    def save(self, folder: Path) -> None:
        """Write ``run.json`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.schema is not None:  # a run keeps what its model's features mean
            path = Path(self.schema)
            content = path.read_bytes()  # without comments: those of a draft tell of cells, and a run is published
            own = without_comments(content) if path.suffix == ".toml" else content
            write_atomically(folder / f"schema{path.suffix}", own)
        values = dataclasses.asdict(self)
        model, score = self.budget(), self.budget(of_score=True)
        if model is not None and score is not None:  # checks of the run compare its own part with what was asked
            values |= {"epsilon": model.epsilon, "delta": model.delta, "whole": [self.epsilon, self.delta]}
        write_atomically(folder / RUN_FILE, (json.dumps(values, indent=2) + "\n").encode())

    def _given(self, *names: str) -> dict[str, Any]:
        values = field_values(self)
        return {name: values[name] for name in names if values[name] is not None}

    @property
    def reading(self) -> dict[str, Any]:
        """How the file is read."""
        return self._given(*_READING)

    @property
    def scanning(self) -> dict[str, Any]:
        """How the file is scanned, if it is."""
        return self._given("cluster", "memory", "threads") | ({"allow_http": True} if self.allow_http else {})

    @property
    def flags(self) -> dict[str, Any]:
        """Settings of the algorithm that have options of their own."""
        return self._given(*_FLAGS)

    def command(self, name: str = "train") -> str:
        """The ``quietgrad train`` that makes this run again, with files named without their folders."""
        words = ["quietgrad", name]
        for name, value in self._said().items():
            flag = _FLAG_NAMES.get(name, f"--{name.replace('_', '-')}")
            if name == "data":
                words.append(value if isinstance(value, Address) else Path(value).name)
            elif name in ("settings", "drop"):
                words += [word for one in value for word in (flag, one)]
            elif isinstance(value, bool):
                words.append(flag)
            elif name in (*_PATHS, "features"):
                words += [flag, value if isinstance(value, Address) else Path(value).name]
            elif isinstance(value, list):
                words += [flag, ",".join(map(str, value))]
            else:
                words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
        return " ".join(shlex.quote(word) for word in words)

    def _said(self) -> dict[str, Any]:
        """The options that differ from what is usual, by the name of their flag; δ and relation always."""
        always = () if self.non_private else ("delta", "relation")
        usual = {one.name: one.default for one in dataclasses.fields(self)}
        return {
            name: value
            for name, value in field_values(self).items()
            if name != "split_key" and (value != usual[name] or name in always)
        }

    def with_login(self, **given: str | None) -> RunSpec:
        """The same run with its addresses given again, as they stand in no file: the login, the query.

        Raises:
            DataError: an address is another one than the run's.
        """
        again: dict[str, Any] = {name: public(text) for name, text in given.items() if text is not None}
        for name, text in again.items():
            if text != getattr(self, name):
                raise DataError(f"{text}: the run's {name} is {getattr(self, name)}. Nothing was read.")
        return replace(self, **again)

    @property
    def uses_estimator(self) -> bool:
        """Whether an estimator is fitted, and not a loss minimised by an algorithm."""
        asked = (self.model, self.class_weight, self.features)
        return self.inference or any(option is not None for option in asked)

    def check(self) -> None:
        """Refuse what cannot be, and options that would do nothing, before any data is read."""
        if self.rows not in ("clip", "normalize"):
            raise BadParameter(f"{self.rows!r}: must be clip or normalize.", param_hint="--rows")
        if self.holdout is not None and self.test is not None:
            raise ValueError("--holdout splits the records of one file; leave --test out.")
        self.person_rule  # noqa: B018 (refuses what cannot be)
        self.budget()
        given = self._said()
        for is_idle, why, names in (
            (self.uses_estimator, "a --model, or one of --features, chooses its own method", _BY_HAND),
            (self.holdout is None and self.test is None, "without --holdout or --test no score is private",
             ("score_share", "exact_score")),
            (self.exact_score or self.non_private, "no score is private", ("score_share",)),
            (self.person is None, "they say how a person's records count; give --person",
             ("combine", "records_per_person", "records_public")),
            (not (isinstance(self.data, Address) or isinstance(self.test, Address)), "DATA is no address",
             ("allow_http",)),
            (self.data is None, "the demo's data is read without them; give DATA", (*_READING, "test")),
        ):  # fmt: skip
            idle = [_FLAG_NAMES.get(name, f"--{name.replace('_', '-')}") for name in names if name in given]
            if is_idle and idle:
                raise ValueError(f"leave {', '.join(idle)} out: {why}.")

    @property
    def person_rule(self) -> PersonRule:
        """How a person's records count."""
        combine: Any = self.combine
        return PersonRule(combine, self.records_per_person)

    @property
    def scores_privately(self) -> bool:
        """Whether records are held out, by ``--holdout`` or ``--test``, whose score is released with noise."""
        held_out = self.holdout is not None or self.test is not None
        return held_out and not self.exact_score and not self.non_private

    def budget(self, *, of_score: bool = False) -> Budget | None:
        """The guarantee of the training, or of the private score of held-out records; ``None`` if there is none.

        The same account pays both; together they are all of ε and δ.
        """
        if not 0.0 < self.score_share < 1.0:
            raise SettingError("{score_share}: must be between 0 and 1.", score_share=self.score_share)
        if self.non_private or (of_score and not self.scores_privately):
            return None
        whole = budget(self.epsilon, self.delta, self.relation)
        if not self.scores_privately:
            return whole
        share = self.score_share if of_score else 1.0 - self.score_share
        return replace(whole, epsilon=whole.epsilon * share, delta=whole.delta * share)

    def cap(self) -> Budget | None:
        """The most that the account as a whole may spend."""
        return None if self.cap_epsilon is None else budget(self.cap_epsilon, self.delta, self.relation)

    def payer(self, folder: Path) -> Account:
        """The account that the run is charged to; all commands on one file have the same."""
        return account_of(self.data, self.account, self.ledger_in(folder), self.cap())

    def make_algorithm(self, data: Dataset, n: int) -> Algorithm:
        """The method asked for, or the default for linear models, chosen for ``n``, a public number of records."""
        if self.algorithm is not None:
            return algorithm_from(self.algorithm, self.flags, self.settings)
        bound = data.row_bound if self.row_bound is None else self.row_bound
        guarantee = self.budget()
        if self.flags or self.settings:  # settings by hand replace the default design
            name, usual = ("dp-gd", _FULL_BATCH) if guarantee is None else ("whitened-gd", {"row_bound": bound})
            by_hand = key_values(self.settings)  # comes before what is usual
            flags = {key: value for key, value in usual.items() if key not in by_hand} | self.flags
            return algorithm_from(name, flags, self.settings)
        design = for_table(
            n,
            data.d,
            budget=guarantee or _LOOSE,  # without noise, the same design as with next to none
            outputs=1 if data.classes is None or len(data.classes) == 2 else len(data.classes),
            row_bound=bound,
            feature_bounds=data.feature_bounds if bound is None else None,
            regression=data.task == "regression",
            sparse=sparse.issparse(data.X),
            inference=False,
        )
        return design if guarantee is not None else replace(design, steps=_NOISELESS_STEPS)

    def read_data(self) -> Dataset:
        """Read and check the data, or open what is scanned; nothing is reserved yet, and nothing held out."""
        if self.data is None:
            data = datasets.demo_dataset()
        elif self.scanning or is_multi_file(self.data):
            if self.uses_estimator or self.holdout is not None:
                name = "--model" if self.uses_estimator else "--holdout"
                raise DataError(f"{self.data}: {name} is not known to scans; give one file, which is read whole.")
            return open_scan(self.data, self.reading, self.scanning, self.test)
        else:
            data = datasets.load(self.data, test=self.test, **self.reading)
            data.refuse_uncounted(self.budget())
        return data

    def load_data(self) -> Dataset:
        """Read and check the data, with a part of it held out if that is asked for."""
        return self.held_out(self.read_data())

    def held_out(self, data: Dataset) -> Dataset:
        """The data with a part of the records held out, if that is asked for."""
        if self.holdout is None:
            return data
        fixed = self.non_private or self.relation == "replace-one"
        return hold_out_records(data, self.holdout, self.split_key or "", fixed=fixed)

    def without_hopeless_score(self, data: Dataset) -> tuple[RunSpec, str | None]:
        """The run without ``--holdout`` where its score would not be worth releasing, and the reason.

        The model then gets all records and all of ε. It is decided from the public number of records: declared, or
        that of the table under replace-one. Where the number is a secret, it is decided after it was counted.
        """
        budget = self.budget(of_score=True)
        if self.holdout is None or budget is None or data.X_test is not None:
            return self, None
        if self.n_public is not None:
            trained = float(self.n_public)
        elif self.relation == "replace-one":
            trained = (1.0 - self.holdout) * data.n
        else:
            return self, None
        why = hopeless_score(trained * self.holdout / (1.0 - self.holdout), budget, data)
        if why is None:
            return self, None
        spec = replace(self, holdout=None, split_key=None, score_share=RunSpec.score_share)
        return spec, f"{why} No records were held out: the model was trained on all of them, with all of ε"

    def ledger_in(self, folder: Path) -> Path | None:
        """The ledger file: the one asked for, or one that the folder had of its own; ``None`` for the project's."""
        own = folder / "ledger.jsonl"
        if self.ledger is not None:
            return Path(self.ledger)
        return own if own.is_file() and not own.is_symlink() else None

    def describe_objective(self, data: Dataset) -> dict[str, Any]:
        """Return what ``objective_from`` needs, and the class names: public facts that are kept with the model."""
        return {
            "objective": self.objective or usual_loss(data.task),
            "regularizer": self.regularizer,
            "intercept": self.intercept,
            "row_bound": data.row_bound if self.row_bound is None else self.row_bound,
            "rows": self.rows,
            "features": data.d,
            "feature_names": None if data.feature_names is None else list(data.feature_names),
            "task": data.task,
            "classes": None if data.classes is None else len(data.classes),
            "class_names": None if data.class_names is None else list(data.class_names),
        }


def with_options(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make fields of :class:`RunSpec` (all, or those named) options of a command, which gets them as ``spec``.

    ``defaults`` are names with another default than a run has.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(RunSpec, include_extras=True)
        wanted = {*names, *defaults} or {one.name for one in dataclasses.fields(RunSpec)} - {"split_key"}
        shared = [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(one.name, one.default),
                annotation=Annotated[hints[one.name], *one.metadata.values()] if one.metadata else hints[one.name],
            )
            for one in dataclasses.fields(RunSpec)
            if one.name in wanted
        ]

        @functools.wraps(command)
        def takes(**given: Any) -> None:
            options = {one.name: given.pop(one.name) for one in shared}
            command(spec=RunSpec.from_options(**options), **given)

        own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "spec"]
        parameters = [*shared, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own)]
        takes.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        takes.__annotations__ = {one.name: one.annotation for one in parameters}
        return takes

    return decorate


def _flat(path: Path, values: Mapping[str, object]) -> dict[str, Any]:
    """The options that a file holds, by name, with all of ε and δ, the score's share included."""
    found: dict[str, Any] = {key.replace("-", "_"): value for key, value in values.items()}
    for group in ("reading", "scanning", "flags"):  # run.json of 0.2 keeps these options together
        found |= dict(found.pop(group, {}))
    epsilon, delta = found.pop("whole", (found.get("epsilon"), found.get("delta", 1e-5)))
    known = {one.name for one in dataclasses.fields(RunSpec)}
    if unknown := sorted(key for key in found.keys() - known if found[key] is not None):
        raise DataError(f"{path}: {', '.join(unknown)}: no options of this version; see `quietgrad train --help`.")
    found = {key: value for key, value in found.items() if key in known}
    return {**found, "settings": found.get("settings") or None, "epsilon": epsilon, "delta": delta}


def account_of(data: str | Path | None, name: str | None, ledger: Path | None, cap: Budget | None) -> Account:
    """The account of the people in a file: the one named, else the file's name.

    Its table is the whole file, so that runs on different columns or parts of it are known as the same people's.
    """
    if name is None:
        parts = Path(data or "demo").parts[-2 if is_multi_file(str(data)) else -1 :]
        try:
            name = check_account_name(" ".join(parts)[-LONGEST:])
        except ValueError:  # a file whose name is none for an account
            name = "default"
    paid = Terms.of(None, account=name, ledger=ledger, cap=cap).account
    return replace(paid, table=Path(data)) if data is not None and Path(data).is_file() else paid


def algorithm_from(name: str, flags: Options, settings: Sequence[str] | None = None) -> Algorithm:
    """The algorithm called ``name`` with the flags that were given and the settings ``KEY=VALUE``.

    An algorithm that takes any oracle gets the one that ``oracle=NAME`` names, with settings ``oracle.KEY=VALUE``
    and the flags that are the oracle's.

    >>> algorithm_from("dp-srm", {"steps": 100, "gamma": None}, ["joint-clip=true", "first_batch_size=400"])
    DPSRM(steps=100, ..., joint_clip=True, ..., first_batch_size=400, ...)
    >>> algorithm_from("perturbed-sgd", {"batch_size": 500}, ["oracle=adaptive-spider", "oracle.kappa=0.01"])
    PerturbedSGD(oracle=AdaptiveSpider(batch_size=500, ..., kappa=0.01, ...), ...)
    """
    given = {key: value for key, value in flags.items() if value is not None}
    said = key_values(settings)
    with usage():
        found = entry(name)
        known = fields_of(found.kind)
        if "oracle" in known:
            source = said.pop("oracle", next(iter(ORACLES)))
            its = fields_of(oracle_class(source))
            own = {key: given.pop(key) for key in list(given) if key not in known and key in its}
            there = {key.partition(".")[2]: said.pop(key) for key in list(said) if key.startswith("oracle.")}
            said["oracle"] = {"name": source, **_merged(own, there)}
        made: Algorithm = found.make(_merged(given, said))
    return made


def _merged(flags: Options, pairs: Options) -> dict[str, Any]:
    """Both together; what is given by its flag and by ``--set`` is refused: the two may differ."""
    for key in flags.keys() & pairs.keys():
        raise ValueError(f"{key!r} is set twice: by its option and by --set.")
    return {**flags, **pairs}


def key_values(settings: Sequence[str] | None) -> dict[str, Any]:
    """The texts ``KEY=VALUE`` of ``--set``.

    >>> key_values(["joint-clip=true"])
    {'joint_clip': 'true'}
    """
    values: dict[str, Any] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise BadParameter(f"{text!r}: must be KEY=VALUE.", param_hint="--set")
        name = key.strip().replace("-", "_")
        if name in values:
            raise BadParameter(f"{name!r} is set twice.", param_hint="--set")
        values[name] = value.strip()
    return values


def objective_from(facts: Options) -> LinearObjective:
    """The objective that ``RunSpec.describe_objective`` describes.

    >>> facts = {"objective": "huber:0.5", "regularizer": "l2:0.1", "intercept": True, "row_bound": None,
    ...          "rows": "clip", "task": "regression", "classes": None}
    >>> objective_from(facts)
    Huber(regularizer=L2(strength=0.1, unpenalized=1), intercept=True, ..., threshold=0.5)
    """
    given = {key: facts[key] for key in ("intercept", "row_bound", "rows", "regularizer")}
    with usage():
        loss: LinearObjective
        loss, _ = make_objective(facts["objective"], given, task=facts["task"], classes=facts["classes"])
    return loss
