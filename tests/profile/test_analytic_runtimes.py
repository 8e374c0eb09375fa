"""What estimates take of a runtime beside its plan: hidden messages, the attention kernel, and notes that say so."""

import msgspec
import pytest

from shardwright.devices.table import device_named, read_devices
from shardwright.estimate.hardware import START_S, Link
from shardwright.estimate.layers import Machine, estimate_layer
from shardwright.estimate.machines import flash_share
from shardwright.estimate.runtimes import RUNTIMES, AttentionKernel, RuntimeName, RuntimeOptions, attention_of
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import read_document, write_document
from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.types import Attention, Cluster, NodeGroup, NodeType, Precision, Recompute
from shardwright.types.hardware_profile import read_hardware_profile
from shardwright.types.model_profile import read_model_profile
from shardwright.types.strategy import LayerStrategy, SequenceParallel

MIXED = Precision(compute="bfloat16")
FREE = Link(1e30, -START_S / 3)
"""A link of which three steps take back what a message starts with."""


@pytest.fixture(scope="module")
def llama():
    return model_of_config(read_presets()["llama-2-7b"].config, "llama", 1024, "a preset")


def block_times(model, **changes):
    machine = Machine(1e30, 1e30, Link(1e10, 0.0), operator_s=0.0)._replace(**changes)
    sharing = LayerStrategy(tp_size=4, dp_size=1, sequence_parallel=SequenceParallel.MEGATRON, type="block")
    found = estimate_layer(model, "block", sharing, 1, MIXED, Attention.AUTO, machine)
    return found.forward_s, found.backward_s


def test_messages_in_pieces_hide_behind_products_that_are_long_enough(llama):
    alone_s = block_times(llama)
    slow = {"flops_per_s": 1e9}
    products_s = block_times(llama, link=FREE, **slow)
    plain_s, hidden_s = block_times(llama, **slow), block_times(llama, message_pieces=4, **slow)
    for alone, product, plain, hidden in zip(alone_s, products_s, plain_s, hidden_s, strict=True):
        messages = plain - product
        assert 0 < messages < alone
        assert hidden == pytest.approx(product + messages / 4, rel=1e-9)


def test_messages_hide_behind_no_more_than_the_products_take(llama):
    """With products that take nothing only the kernels' start hides anything."""
    plain, hidden = block_times(llama)[0], block_times(llama, message_pieces=1000)[0]
    kernels = block_times(llama, link=FREE)[0]
    messages = plain - kernels
    assert messages > 2 * kernels
    assert hidden == pytest.approx(messages, rel=1e-9)


def test_every_runtime_is_frozen_and_names_its_sources():
    assert set(RUNTIMES) == set(RuntimeName)
    for name, runtime in RUNTIMES.items():
        assert runtime.name is name and runtime.sources and runtime.text.startswith(f"runtime {name}: ")
        with pytest.raises(AttributeError):
            runtime.fused = not runtime.fused
    with pytest.raises(TypeError):
        RUNTIMES["mine"] = RUNTIMES["nanotron"]


def test_options_stand_in_for_one_habit_each():
    tuned = RUNTIMES[RuntimeName.MEGATRON_CORE]
    assert RuntimeOptions(runtime=RuntimeName.MEGATRON_CORE).assumed == tuned
    told = RuntimeOptions(runtime=RuntimeName.MEGATRON_CORE, attention=AttentionKernel.FLASH2, launch_us=0.0).assumed
    assert told == msgspec.structs.replace(tuned, attention=AttentionKernel.FLASH2, operator_s=0.0)
    plain = RuntimeOptions(fused=True, overlap_slowdowns="1.5:2").assumed
    assert plain.fused and plain.overlap.across.collective == 2


def test_a_kernel_s_rate_is_that_of_its_own_source():
    table = read_devices()
    for device, wanted in (("H100-SXM", (0.35, 0.60)), ("A100-80", (0.615, 0.615)), ("L4", (None, None))):
        _, found = device_named(table, device)
        shares = [flash_share(found, kernel) for kernel in (AttentionKernel.FLASH2, AttentionKernel.FLASH3)]
        assert tuple(share for share, _ in shares) == wanted
        assert all((share is None) == (source is None) for share, source in shares)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (Attention.AUTO, (AttentionKernel.FLASH3, Attention.AUTO)),
        (Attention.SDPA, (AttentionKernel.FLASH3, Attention.SDPA)),
        (Attention.FLASH_ATTENTION_2, (AttentionKernel.FLASH2, Attention.FLASH_ATTENTION_2)),
        (Attention.SDPA_MATH, (AttentionKernel.EAGER, Attention.SDPA_MATH)),
    ],
)
def test_settings_that_name_a_kernel_hold(asked, wanted):
    tuned = RUNTIMES[RuntimeName.MEGATRON_CORE]
    assert attention_of(tuned, asked) == wanted
    old = msgspec.structs.replace(tuned, attention=AttentionKernel.EAGER)
    assert (attention_of(old, asked)[0] is AttentionKernel.EAGER) == (asked in (Attention.AUTO, Attention.SDPA_MATH))


def test_both_profiles_say_which_runtime_they_stand_on(llama, command, tmp_path):
    node = NodeType(device="NVIDIA H100 80GB HBM3", devices_per_node=8, memory_bytes=80 << 30)
    cluster = Cluster(name="some", nodes=(NodeGroup(node_type="a", count=2),), node_types={"a": node})
    write_document(tmp_path / "model.json", llama)
    write_document(tmp_path / "cluster.json", cluster)
    write_document(
        tmp_path / "settings.json",
        ProfileSettings(
            tp_sizes=(4,),
            sequence_parallel=(SequenceParallel.MEGATRON,),
            recompute=(Recompute.NONE,),
            micro_batch_sizes=(4,),
            precision=MIXED,
        ),
    )
    inputs = [f"--{name}={tmp_path / name}.json" for name in ("model", "cluster", "settings")]

    def made(*options):
        out = [f"--out={tmp_path / 'm.h5'}", f"--hardware-out={tmp_path / 'h.h5'}", "--inter-node-gbit-s=3200"]
        out.append("--launch-us=0")
        called = command("analytic", *inputs, *out, *options)
        assert called.returncode == 0, called.stderr
        profile = read_model_profile(tmp_path / "m.h5")
        rows = [r for r in profile.layers.rows if r.type == "block" and r.recompute is Recompute.NONE]
        return rows[0].forward_s, profile, read_hardware_profile(tmp_path / "h.h5")

    plain_s, profile, hardware = made()
    assert "runtime shardwright: single operators, attention flash2" in profile.provenance.notes
    assert len(hardware.overlap.rows) == 0
    tuned_s, profile, hardware = made("--runtime", "megatron-core")
    assert tuned_s < 0.8 * plain_s
    notes = profile.provenance.notes
    assert "runtime megatron-core: fused kernels, attention flash3" in notes and "megatron-core: NVIDIA NeMo" in notes
    assert "flash attention reaches 0.6 of the matrix rate" in notes and "pytorch/benchmark, commit ff65cb6" in notes
    assert {row.compute_slowdown for row in hardware.overlap.rows} == {1.19}
    eager_s, profile, _ = made("--attention", "eager")
    assert eager_s > plain_s and str(profile.origin.attention) == "eager"
    named = msgspec.structs.replace(
        read_document(tmp_path / "settings.json", ProfileSettings), attention=Attention.SDPA
    )
    write_document(tmp_path / "settings.json", named)
    called = command("analytic", *inputs, f"--out={tmp_path / 'n.h5'}", "--attention", "eager")
    told = "error: --attention: is eager, but the settings have attention sdpa: leave one of them out\n"
    assert (called.returncode, called.stderr) == (2, told) and not (tmp_path / "n.h5").exists()
    assert "attention is made of matrix products and keeps its scores" in profile.provenance.notes
