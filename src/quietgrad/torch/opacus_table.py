"""Every other public name of Opacus 1.6: what it is here, or a sentence that says what to use.

``quietgrad.torch`` has all of them under their own names, and under Opacus' paths
(``quietgrad.torch.utils.batch_memory_manager``). A name that has no counterpart can be imported, so that the script
runs up to where it is used; there it raises an error that says what to write.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import nn

from quietgrad.torch.loops.distributed import DifferentiallyPrivateDistributedDataParallel
from quietgrad.torch.loops.wrappers import BatchMemoryManager, PrivateLoader, PrivateModule, PrivateOptimizer
from quietgrad.torch.opacus_accounting import (
    GaussianAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
    get_noise_multiplier,
)

if TYPE_CHECKING:
    from importlib.abc import Loader


def wrap_data_loader(*, data_loader: object, max_batch_size: int, optimizer: Any) -> BatchMemoryManager:
    """Opacus' function under a ``BatchMemoryManager``: the loader, cut into physical batches."""
    return BatchMemoryManager(data_loader=data_loader, max_physical_batch_size=max_batch_size, optimizer=optimizer)


THINGS: dict[str, Any] = {
    "get_noise_multiplier": get_noise_multiplier,
    "create_accountant": create_accountant,
    "RDPAccountant": RDPAccountant,
    "PRVAccountant": PRVAccountant,
    "IAccountant": RDPAccountant,
    "GaussianAccountant": GaussianAccountant,
    "wrap_data_loader": wrap_data_loader,
    "DPDDP": DifferentiallyPrivateDistributedDataParallel,
    # torch's own layers, which are clipped as they are
    "RNNLinear": nn.Linear,
    "DPRNNCell": nn.RNNCell,
    "DPGRUCell": nn.GRUCell,
    "DPLSTMCell": nn.LSTMCell,
    # What ModuleValidator raises
    **dict.fromkeys(
        (
            "UnsupportedError", "UnsupportedModuleError", "UnsupportableModuleError", "NotYetSupportedModuleError",
            "ShouldReplaceModuleError", "IllegalModuleConfigurationError",
        ),
        ValueError,
    ),
}  # fmt: skip
"""Names that have a counterpart, besides those that ``quietgrad.torch`` lists."""

_MADE = "make_private returns the optimizer that it was given, made private; it is not made by hand"
_WRAPPED = "make_private returns the private model; a module is not wrapped by hand"
CLASSES: dict[str, tuple[type | None, str]] = {
    **dict.fromkeys(
        (
            "DPOptimizer", "DPPerLayerOptimizer", "DPOptimizerFastGradientClipping", "DistributedDPOptimizer",
            "DistributedDPOptimizerFastGradientClipping", "DistributedDPOptimizerFastGradientlipping",
            "FSDPOptimizerFastGradientClipping",
            "SimpleDistributedPerLayerOptimizer", "DistributedPerLayerOptimizer",
        ),
        (PrivateOptimizer, _MADE),
    ),
    **dict.fromkeys(
        (
            "GradSampleModule", "AbstractGradSampleModule", "GradSampleModuleExpandedWeights",
            "GradSampleModuleFastGradientClipping", "GradSampleModuleFastGradientClippingFSDP",
            "GradSampleModuleFastGradientClippingTP", "GradSampleModuleNoOp",
        ),
        (PrivateModule, _WRAPPED),
    ),
    "DPDataLoader": (PrivateLoader, "make_private returns the private loader of the DataLoader that it was given"),
    **dict.fromkeys(
        ("AdaClipDPOptimizer", "PrivacyEngineAdaptiveClipping"),
        (None, "adaptive clipping pays for a second release in each step; use clipping='automatic'"),
    ),
    **dict.fromkeys(
        (
            "DPTensorFastGradientClipping", "DPLossFastGradientClipping", "DPTensorFastGradientAdaptiveClipping",
            "DPLossFastGradientAdaptiveClipping",
        ),
        (None, "give make_private criterion=, and call the private criterion that comes back"),
    ),
    **dict.fromkeys(
        ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler", "BatchSplittingSampler"),
        (None, "samples are drawn by the private loader; give make_private a DataLoader with batch_size="),
    ),
    **dict.fromkeys(
        (
            "AbstractGradSampleHooks", "GradSampleHooks", "GradSampleHooksFastGradientClipping",
            "GradSampleHooksFastGradientClippingFSDP", "GradSampleHooksFastGradientClippingTP",
            "GradSampleHooksNoOp",
        ),
        (None, "the module has no hooks; make_private returns the private model"),
    ),
    "DPLightningDataModule": (
        None, "give make_private the DataModule's train_dataloader() in configure_optimizers, with wrap_model=False"
    ),
    "FSDP2Wrapper": (None, "call torch's fully_shard on the module, and then make the optimizer"),
    "SequenceBias": (None, "use torch.nn.MultiheadAttention(add_bias_kv=True), which is clipped as it is"),
    **dict.fromkeys(
        ("DPRNNBase", "DPRNNCellBase", "RenameParamsMixin"),
        (None, "torch's own nn.RNN, nn.GRU and nn.LSTM are clipped as they are; derive from nn.Module"),
    ),
    "CollateFnWithEmpty": (None, "an empty sample needs no collate function here; give the DataLoader your own"),
    "ModelWithLoss": (None, "qt.clipped_gradient_sum(model, loss, batch, clip=…) takes model and loss as they are"),
    **dict.fromkeys(
        (
            "PoissonSubsampledGaussianPRV", "TruncatedPrivacyRandomVariable", "DiscretePRV", "Domain",
        ),
        (None, "qg.account(qg.events.poisson_gaussian(…), delta=…, relation=…) proves an ε"),
    ),
}  # fmt: skip
"""Classes: those of which an object may be asked for by ``isinstance``, and why none is made."""

_ANY_LAYER = "gradients of any layer are computed as they are, so nothing is registered; leave it out"
_PLAIN = "it is plain torch"
_INSIDE = "clipped sums are made by qt.clipped_gradient_sum(model, loss, batch, clip=…)"
FUNCTIONS: dict[str, str] = {
    **dict.fromkeys(("register_grad_sampler", "register_norm_sampler", "register_accountant"), _ANY_LAYER),
    **dict.fromkeys(
        ("register_module_validator", "register_module_fixer", "DEFAULT_MODULE_VALIDATOR"),
        "ModuleValidator refuses and replaces known layers alone; change a layer of your own before make_private",
    ),
    **dict.fromkeys(("validate", "fix"), "call ModuleValidator.validate(model) or ModuleValidator.fix(model)"),
    **dict.fromkeys(
        (
            "prepare_module", "wrap_model", "get_gsm_class", "get_hooks_class", "get_optimizer_class",
            "make_functional", "prepare_layer",
        ),
        "call make_private, which makes module, optimizer and loader private together",
    ),
    **dict.fromkeys(
        ("wrap_collate_with_empty", "shape_safe", "dtype_safe", "is_batch_empty"),
        "an empty sample needs no collate function here; give the DataLoader your own",
    ),
    "switch_generator": "samples are drawn by a secret key; a seed= for tests says that nothing is private",
    "average_gradients": "the private loop adds up the gradients of all processes; leave it out",
    "has_trainable_params": f"{_PLAIN}: any(p.requires_grad for p in module.parameters())",
    "has_params": f"{_PLAIN}: any(True for _ in module.parameters(recurse=False))",
    **dict.fromkeys(
        ("parametrized_modules", "trainable_modules", "iterate_submodules"), f"{_PLAIN}: module.named_modules()"
    ),
    "trainable_parameters": f"{_PLAIN}: (p for p in module.named_parameters() if p[1].requires_grad)",
    "requires_grad": f"{_PLAIN}: any(p.requires_grad for p in module.parameters())",
    "clone_module": f"{_PLAIN}: copy.deepcopy(module)",
    "get_submodule": f"{_PLAIN}: module.get_submodule(name)",
    "are_state_dict_equal": f"{_PLAIN}: all(torch.equal(a[k], b[k]) for k in a)",
    **dict.fromkeys(
        (
            "params", "filter_out_old_keys", "apply_permutation", "compute_seq_lengths", "unpack_packedsequences",
        ),
        f"{_PLAIN} without any privacy in it; write the lines that you need",
    ),
    **dict.fromkeys(
        (
            "create_or_accumulate_grad_sample", "promote_current_grad_sample", "create_norm_sample",
            "ft_compute_per_sample_gradient", "calc_sample_norms", "calc_sample_norms_one_layer",
            "sum_over_all_but_batch_and_last_n", "unfold2d", "unfold3d", "filter_dilated_rows",
            "compute_microbatch_grad_sample", "compute_opacus_grad_sample", "check_torch_version_for_ew_sample",
            "get_grad_sample_modes", "compute_microbatch_grad_sample_tensor_or_seq",
            "compute_grad_samples_microbatch_and_opacus", "convolution2d_backward_as_a_convolution",
            "compute_conv_grad_sample", "compute_sequence_bias_grad_sample", "compute_rnn_linear_grad_sample",
            "compute_embedding_grad_sample", "compute_embeddingbag_gradsampler", "compute_embedding_norm_sample",
            "compute_group_norm_grad_sample", "compute_instance_norm_grad_sample", "compute_layer_norm_grad_sample",
            "compute_linear_grad_sample", "compute_linear_norm_sample", "compute_rms_norm_grad_sample",
        ),
        f"gradients of single records are not handed out; {_INSIDE}",
    ),
    "check_per_sample_gradients_are_correct": f"qt.explain(model, batch, loss) says how each is made; {_INSIDE}",
    **dict.fromkeys(
        ("compute_rdp", "get_privacy_spent", "compose_heterogeneous", "compute_safe_domain_size", "discretize"),
        "qg.account(qg.events.poisson_gaussian(…), delta=…, relation=…) proves an ε",
    ),
    **dict.fromkeys(
        ("compute_mu_uniform", "compute_mu_poisson", "delta_eps_mu", "eps_from_mu", "compute_eps_uniform",
         "compute_eps_poisson"),
        "a central limit is no upper bound on what is spent; use qg.account, which proves an ε",
    ),
    "T_state_dict": "annotate states as dict[str, Any]",
}  # fmt: skip
"""Functions that have no counterpart, and what to write instead."""


class _StandIn(type):
    """A class of Opacus that is not made here: it may be imported, annotated with and asked for."""

    _of: type | None
    _instead: str

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise ValueError(f"{cls.__name__}: {cls._instead}.")

    def __instancecheck__(cls, instance: object) -> bool:
        return cls._of is not None and isinstance(instance, cls._of)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(f"{cls.__name__}.{name}: {cls._instead}.")


def _function(name: str, instead: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError(f"{name}: {instead}.")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not here: raises, with what to use ({instead})."
    return refuse


def opacus_name(name: str) -> Any:
    """What a public name of Opacus is here; ``AttributeError`` for a name that Opacus does not have.

    >>> isinstance(nn.Linear(1, 1), opacus_name("GradSampleModule"))
    False
    >>> opacus_name("DPOptimizer")(noise_multiplier=1.0)
    Traceback (most recent call last):
    ValueError: DPOptimizer: make_private returns the optimizer that it was given, made private; it is not ...
    """
    if name in THINGS:
        return THINGS[name]
    if name in CLASSES:
        of, instead = CLASSES[name]
        return _StandIn(name, (), {"_of": of, "_instead": instead, "__doc__": f"Not here: {instead}."})
    if name in FUNCTIONS:
        return _function(name, FUNCTIONS[name])
    raise AttributeError(
        f"quietgrad.torch has no {name!r}, and neither has Opacus 1.6. See docs/opacus-arguments.md."
    )


_PATHS = """
accountants accountants.accountant accountants.analysis accountants.analysis.gdp accountants.analysis.prv
accountants.analysis.prv.compose accountants.analysis.prv.domain accountants.analysis.prv.prvs
accountants.analysis.rdp accountants.gdp accountants.prv accountants.rdp accountants.registry
accountants.utils data_loader grad_sample grad_sample.functorch grad_sample.grad_sample_module
grad_sample.grad_sample_module_fast_gradient_clipping
grad_sample.grad_sample_module_fast_gradient_clipping_fsdp
grad_sample.grad_sample_module_fast_gradient_clipping_tp grad_sample.gsm_base grad_sample.gsm_exp_weights
grad_sample.gsm_no_op grad_sample.utils grad_sample.conv grad_sample.dp_multihead_attention grad_sample.dp_rnn
grad_sample.embedding grad_sample.embedding_norm_sample grad_sample.group_norm grad_sample.instance_norm
grad_sample.layer_norm grad_sample.linear grad_sample.rms_norm layers.dp_multihead_attention layers.dp_rnn
layers.param_rename lightning optimizers optimizers.adaclipoptimizer optimizers.ddp_perlayeroptimizer
optimizers.ddpoptimizer optimizers.ddpoptimizer_fast_gradient_clipping
optimizers.fsdpoptimizer_fast_gradient_clipping optimizers.optimizer
optimizers.optimizer_fast_gradient_clipping optimizers.perlayeroptimizer optimizers.utils privacy_engine
schedulers schedulers.grad_clip_scheduler schedulers.noise_scheduler utils utils.adaptive_clipping
utils.adaptive_clipping.adaptive_clipping_utils utils.batch_memory_manager utils.fast_gradient_clipping_utils
utils.fsdp_utils utils.module_utils utils.packed_sequences utils.per_sample_gradients_utils utils.tensor_utils
utils.uniform_sampler validators validators.batch_norm validators.errors validators.gru
validators.instance_norm validators.lstm validators.module_validator validators.multihead_attention
validators.utils
"""
MODULES = frozenset(_PATHS.split())
"""Opacus' modules, by which its names are imported too."""
_ROOM = "quietgrad.torch"


class OpacusFinder:
    """A finder and loader of modules under Opacus' paths. It is asked last."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of an Opacus path, or ``None`` for any other."""
        if fullname.removeprefix(f"{_ROOM}.") not in MODULES or not fullname.startswith(f"{_ROOM}."):
            return None
        return ModuleSpec(fullname, cast("Loader", self), is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """An ordinary module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module all public names."""

        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(sys.modules[_ROOM], name)

        module.__dict__["__getattr__"] = find


if not any(isinstance(finder, OpacusFinder) for finder in sys.meta_path):
    sys.meta_path.append(OpacusFinder())
