"""nvidia-smi nvlink -s, -R, -e, info, -L, and topo -m."""

from __future__ import annotations

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import smi_nvlink, smi_topo
from seatrial.check.outputs.tool import Context, Tool

H200, A6000, PCIE, V100 = "NVIDIA H200", "NVIDIA RTX A6000", "NVIDIA H100 PCIe", "Tesla V100-SXM2-32GB"
OFF = "NVML: Unable to retrieve NVLink information as all links are inActive"
(TOPO,) = smi_topo.TOOLS


def tool(text: str) -> Tool[object]:
    (found,) = [t for t in smi_nvlink.TOOLS if t.matches(text)]
    return found  # type: ignore[return-value]


def read(text: str, **known: object) -> list[Finding]:
    return tool(text).read(text, "n", Context(**known))  # type: ignore[arg-type]


def bad(found: list[Finding]) -> list[tuple[str, str, int | None, int | None]]:
    return [(f.code, f.verdict, f.target.gpu, f.target.link) for f in found if f.verdict != "PASS"]


def node(
    gpus: int, name: str = H200, links: int = 18, rate: str = "26.562 GB/s", form: str = "Link {}: {}"
) -> list[list[str]]:
    """The lines of each GPU of a `-s` output."""
    return [
        [f"GPU {g}: {name} (UUID: GPU-{g:08d}-0000)"] + [f"\t {form.format(k, rate)}" for k in range(links)]
        for g in range(gpus)
    ]


def text(gpus: list[list[str]]) -> str:
    return "\n".join(line for gpu in gpus for line in gpu) + "\n"


# -- -s


def test_a_healthy_board_passes() -> None:
    found = read(text(node(8)))
    assert worst(found) == "PASS"
    assert tool(text(node(8))).inventory_of(text(node(8)), "n") == {"GPUs": 8, "GPU": H200, "NVLinks up": 144}


def test_one_inactive_link_is_named() -> None:
    gpus = node(8)
    gpus[5][4] = "\t Link 3: <inactive>"
    (said,) = [f for f in read(text(gpus)) if f.verdict != "PASS"]
    assert (said.code, said.verdict, said.target.gpu, said.target.link) == ("NVL001", "FAIL", 5, 3)
    assert (said.measured, said.expected.value, said.peers_median) == (17, 18, 18.0)  # type: ignore[union-attr]
    assert said.evidence == (f"n:{5 * 19 + 5}",)


def test_links_that_are_not_listed_are_down() -> None:
    gpus = node(8)
    del gpus[2][-6:]
    assert bad(read(text(gpus))) == [("NVL001", "FAIL", 2, None)]


def test_a_gpu_without_any_link_on_a_board_fails() -> None:
    gpus = node(8)
    gpus[1][1:] = [OFF]
    assert bad(read(text(gpus))) == [("NVL001", "FAIL", 1, None)]


def test_a_slow_link() -> None:
    gpus = node(8)
    gpus[6][10] = "\t Link 9: 13.281 GB/s"
    assert bad(read(text(gpus))) == [("NVL002", "FAIL", 6, 9)]


def test_an_unknown_gpu_is_judged_by_its_siblings() -> None:
    gpus = node(4, name="NVIDIA X999", links=10, rate="60 GB/s")
    assert worst(read(text(gpus))) == "PASS"
    gpus[3][2] = "\t Link 1: <inactive>"
    assert bad(read(text(gpus))) == [("NVL001", "FAIL", 3, 1)]
    alone = node(1, name="NVIDIA X999")
    alone[0][1:] = [OFF]
    assert bad(read(text(alone))) == [("NVL008", "UNJUDGED", 0, None)]


@pytest.mark.parametrize(
    ("count", "verdict"), [(1, "PASS"), (2, "PASS"), (4, "PASS"), (7, "FAIL"), (8, "PASS"), (3, "FAIL")]
)
def test_how_many_gpus_a_board_shows(count: int, verdict: str) -> None:
    found = read(text(node(count)))
    assert worst(found) == verdict
    assert [f.verdict for f in found if f.code == "GPU001"] == [verdict]


def test_the_plan_counts_more_than_the_board() -> None:
    assert bad(read(text(node(4)), gpus=8)) == [("GPU001", "FAIL", None, None)]


def test_a_single_requested_gpu_is_not_counted() -> None:
    found = read(text(node(8)[7:]), gpus=8)
    assert worst(found) == "PASS"
    assert not [f for f in found if f.code == "GPU001"]
    assert bad(read(text(node(8)[2:]))) == [("GPU001", "UNJUDGED", None, None)]


V100 = "Tesla V100-SXM2-32GB"


def test_a_v100_of_a_full_mesh_has_six_links() -> None:
    """All eight with the same link dark looked alike, and passed; fewer than eight may have fewer up by design."""

    def mesh(gpus: int, dark: int) -> str:
        made = node(gpus, V100, 6, "25.781 GB/s")
        for gpu in made:
            gpu[1 : 1 + dark] = [f"\t Link {k}: <inactive>" for k in range(dark)]
        return text(made)

    assert worst(read(mesh(8, 0))) == "PASS"
    assert bad(read(mesh(8, 1))) == [("NVL001", "FAIL", g, 0) for g in range(8)]
    assert worst(read(mesh(4, 0))) == "PASS"
    assert {f.verdict for f in read(mesh(4, 2)) if f.verdict != "PASS"} == {"UNJUDGED"}
    alone = text(node(1, V100, 6, "25.781 GB/s")).replace("Link 5: 25.781 GB/s", "Link 5: <inactive>")
    assert worst(read(alone)) == "UNJUDGED"


def test_inactive_links_on_all_unknown_gpus_are_unjudged() -> None:
    gpus = node(8, "NVIDIA Z9", 8)
    for gpu in gpus:
        gpu[8] = "\t Link 7: <inactive>"
    assert worst(read(text(gpus))) == "UNJUDGED"
    assert worst(read(text(node(8, "NVIDIA Z9", 8)))) == "PASS"


def test_a_link_at_no_rate_at_all_is_down() -> None:
    assert worst(read(text(node(8, "NVIDIA Z9", 8, "0 GB/s")))) == "FAIL"
    assert worst(read(text(node(8, H200, 18, "0 GB/s")))) == "FAIL"


@pytest.mark.parametrize(
    ("up", "dark", "verdict"),
    # Cards in pairs: all without, or the odd one, is by design; two without are a bridge that is missing.
    [(2, 0, "PASS"), (0, 2, "PASS"), (2, 1, "PASS"), (2, 2, "WARN"), (4, 2, "WARN")],
)
def test_bridged_cards(up: int, dark: int, verdict: str) -> None:
    gpus = node(up + dark, name=A6000, links=4, rate="14.062 GB/s")
    for gpu in gpus[up:]:
        gpu[1:] = [OFF.replace("NVLink", "Nvlink")]
    assert worst(read(text(gpus))) == verdict


def test_a_bridged_card_has_twelve_of_eighteen_links_by_design() -> None:
    assert worst(read(text(node(2, name=PCIE, links=12)))) == "PASS"
    assert bad(read(text([node(2, name=PCIE, links=12)[0], node(2, name=PCIE, links=8)[1]]))) == [
        ("NVL001", "FAIL", 1, None)
    ]


def test_no_nvlink_message_is_read_on_its_own_line_or_after_name() -> None:
    says = "Device does not have or support Nvlink"
    apart = [["GPU 0: NVIDIA RTX A4000 (UUID: GPU-a)", f"\t {says}"]]
    behind = [[f"GPU 0: NVIDIA RTX A4000 (UUID: GPU-a) {says}"]]
    for gpus in (apart, behind):
        assert worst(read(text(gpus))) == "PASS"
    assert (
        worst(read(text([[f"GPU 0: {H200} (UUID: GPU-a) {says}"], [f"GPU 1: {H200} (UUID: GPU-b) {says}"]])))
        == "FAIL"
    )


def test_a_virtual_machine_with_one_gpu_may_have_no_link() -> None:
    gpus = node(1)
    gpus[0][1:] = [OFF]
    assert bad(read(text(gpus))) == [("NVL001", "UNJUDGED", 0, None)]


def test_a_damaged_line_does_not_pass() -> None:
    gpus = node(8)
    gpus[4][7] = "\t Link 6: 26.5?2 GB/s"
    assert "UNJUDGED" in {f.verdict for f in read(text(gpus)) if f.code == "OUT002"}
    assert worst(read(text(gpus) + "\t Lin")) != "PASS"
    assert worst(read("\t Link 17: 26.562 GB/s\n" + text(node(8)))) != "PASS"


def test_a_gpu_that_comes_twice_is_damage() -> None:
    (said,) = read(text(node(2)) + text(node(1)))
    assert (said.code, said.verdict) == ("OUT001", "UNJUDGED")


# -- -R, info, -L


def remote(gpus: int, links: int = 12) -> list[list[str]]:
    return node(gpus, PCIE, links, "Remote Device 00000000:D5:00.0", "Link {0}: {1}: Link {0}")


def test_remote_devices() -> None:
    assert worst(read(text(remote(2)))) == "PASS"
    gpus = remote(2)
    del gpus[1][5:]
    assert bad(read(text(gpus))) == [("NVL001", "FAIL", 1, None)]


def test_link_firmware_that_differs() -> None:
    gpus = [
        [
            f"GPU {g}: NVIDIA GB200 (UUID: GPU-{g})",
            "\t NVLE: disabled",
            "\t Firmware Version:",
            "\t     MSE: 14:4:0",
        ]
        for g in range(4)
    ]
    assert worst(read(text(gpus))) == "PASS"
    gpus[2][3] = "\t     MSE: 13:9:0"
    assert bad(read(text(gpus))) == [("GPU010", "WARN", 2, None)]


def test_the_bare_list_counts_gpus() -> None:
    assert worst(read(text(node(8, links=0)))) == "PASS"
    assert bad(read(text(node(7, links=0)))) == [("GPU001", "FAIL", None, None)]


# -- -e


def errors(gpus: int, links: int = 6, name: str = V100, **values: int) -> str:
    """Counters of an old layout; `values` is by "replay_GPU_LINK"."""
    lines = []
    for g in range(gpus):
        lines.append(f"GPU {g}: {name} (UUID: GPU-{g})")
        for k in range(links):
            for counter in ("Replay", "Recovery", "CRC"):
                lines.append(f"\t Link {k}: {counter} Errors: {values.get(f'{counter.lower()}_{g}_{k}', 0)}")
            lines.append("")
    return "\n".join(lines)


def test_quiet_counters_pass_and_a_few_replays_are_normal() -> None:
    assert worst(read(errors(8))) == "PASS"
    assert worst(read(errors(8, replay_3_1=4))) == "PASS"


def test_a_saturated_counter_and_an_outlier() -> None:
    found = read(errors(8, crc_2_0=65535, replay_5_3=2000, recovery_1_1=1))
    assert sorted(bad(found)) == [
        ("NVL003", "WARN", 1, 1),
        ("NVL003", "WARN", 5, 3),
        ("NVL004", "FAIL", 2, 0),
    ]


def test_of_two_links_the_bad_one_is_found() -> None:
    both = errors(1, 2).replace("Link 1: CRC Errors: 0", "Link 1: CRC Errors: 9912")
    assert ("NVL003", "WARN", 0, 1) in bad(read(both))


def test_a_count_common_to_all_links_is_unjudged() -> None:
    all_over = {f"replay_{g}_{k}": 40 + g for g in range(8) for k in range(6)}
    assert {f.verdict for f in read(errors(8, **all_over))} == {"UNJUDGED", "PASS"}


def test_forward_error_correction_is_not_an_error() -> None:
    gpus = []
    for g in range(2):
        gpus.append([f"GPU {g}: NVIDIA B300 SXM6 AC (UUID: GPU-{g})"])
        for k in range(18):
            gpus[-1] += [
                f"\t Link {k}: Malformed packet Errors: 0",
                f"\t Link {k}: Effective Errors: 0",
                f"\t Link {k}: Effective BER: 15e-255",
                f"\t Link {k}: FEC Errors - 0: 36140749276",
                f"\t Link {k}: Raw BER Lane 0: 2061",
            ]
    assert worst(read(text(gpus))) == "PASS"
    gpus[1][6 * 5 + 2] = "\t Link 6: Effective Errors: 12"
    assert bad(read(text(gpus))) == [("NVL003", "WARN", 1, 6)]


def test_missing_counters_do_not_pass() -> None:
    lines = errors(2).split("\n")
    for end in range(2, len(lines) - 1):
        part = "\n".join(lines[:end])
        if (
            lines[end].strip()
            and not lines[end].startswith("GPU")
            and any(t.matches(part) for t in smi_nvlink.TOOLS)
        ):
            assert worst(read(part)) != "PASS", lines[end]


# -- topo -m


def matrix(joins: list[list[str]], nics: int = 0) -> str:
    names = [f"GPU{g}" for g in range(len(joins))] + [f"NIC{n}" for n in range(nics)]
    out = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for g, row in enumerate(joins):
        out.append("\t".join([f"GPU{g}", *row, *["PIX"] * nics, "0-31", "0", "N/A"]))
    for n in range(nics):
        out.append(
            "\t".join([f"NIC{n}", *["PIX"] * len(joins), *["X" if m == n else "SYS" for m in range(nics)]])
        )
    return "\n".join(
        [
            *out,
            "",
            "Legend:",
            "",
            "  X    = Self",
            "  NV#  = Connection traversing a bonded set of # NVLinks",
            "",
        ]
    )


def full(count: int, join: str = "NV18") -> list[list[str]]:
    return [["X" if a == b else join for b in range(count)] for a in range(count)]


def test_a_full_board_passes_with_its_nics() -> None:
    found = TOPO.read(matrix(full(8), nics=9), "t")
    assert worst(found) == "PASS"
    inventory = TOPO.inventory_of(matrix(full(8), nics=9), "t")
    assert inventory == {"GPUs": 8, "NICs in topo": 9, "NVLinks between GPUs": 28 * 18}
    coloured = matrix(full(8)).replace("GPU0\t", "\x1b[4mGPU0\t", 1).replace("NUMA ID", "NUMA ID\x1b[0m", 1)
    assert worst(TOPO.read(coloured, "t")) == "PASS"


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_a_gpu_is_missing_from_a_full_board(count: int) -> None:
    assert bad(TOPO.read(matrix(full(count)), "t")) == [("GPU001", "FAIL", None, None)]


def test_a_gpu_with_fewer_links_is_named_and_not_its_peers() -> None:
    joins = full(8)
    for other in range(8):
        if other != 5:
            joins[5][other] = joins[other][5] = "NV12"
    assert bad(TOPO.read(matrix(joins), "t")) == [("NVL006", "FAIL", 5, None)]
    for other in range(8):
        if other != 5:
            joins[5][other] = joins[other][5] = "SYS"
    assert bad(TOPO.read(matrix(joins), "t")) == [("NVL006", "FAIL", 5, None)]


def pairs(count: int, missing: int | None = None) -> list[list[str]]:
    joins = full(count, "SYS")
    for a in range(0, count - 1, 2):
        if a != missing:
            joins[a][a + 1] = joins[a + 1][a] = "NV12"
    return joins


def test_pairs_by_bridges() -> None:
    assert worst(TOPO.read(matrix(pairs(8)), "t")) == "PASS"
    assert worst(TOPO.read(matrix(pairs(3)), "t")) == "PASS"
    assert bad(TOPO.read(matrix(pairs(8, missing=2)), "t")) == [("NVL006", "WARN", g, None) for g in (2, 3)]
    # The same matrix on GPUs that are known to stand on a switch.
    assert {f.verdict for f in TOPO.read(matrix(pairs(8)), "t", Context(gpu=H200))} == {"FAIL"}


def test_no_nvlink_at_all_depends_on_the_kind_of_gpu() -> None:
    apart = matrix(full(4, "SYS"))
    assert worst(TOPO.read(apart, "t")) == "UNJUDGED"
    assert worst(TOPO.read(apart, "t", Context(gpu="NVIDIA L40S"))) == "PASS"
    assert worst(TOPO.read(apart, "t", Context(gpu=H200))) == "FAIL"


def test_the_mesh_of_a_dgx_1_has_six_links_each() -> None:
    """Each GPU has three links of two and one within its four (here), and one or two to the other four."""

    def mesh(across: str) -> str:
        joins = full(8, "SYS")
        for a in range(8):
            for b in range(8):
                if a != b and a // 4 == b // 4:
                    joins[a][b] = "NV2" if (a ^ b) == 3 else "NV1"
                elif (a ^ b) == 4:
                    joins[a][b] = across
        return matrix(joins)

    assert worst(TOPO.read(mesh("NV2"), "t", Context(gpu=V100))) == "PASS"
    assert bad(TOPO.read(mesh("NV1"), "t", Context(gpu=V100))) == [
        ("NVL006", "FAIL", g, None) for g in range(8)
    ]
    assert worst(TOPO.read(mesh("NV1"), "t")) == "PASS"  # nobody says what they are


def test_a_damaged_matrix_does_not_pass() -> None:
    whole = matrix(full(8))
    lines = whole.split("\n")
    for end in range(2, 9):
        assert worst(TOPO.read("\n".join(lines[:end]), "t")) == "UNJUDGED"
    for old, new in (
        ("NV18", "NV1"),
        ("NV18", "N18"),
        ("GPU3\tNV18\tNV18", "GPU3\tNV18"),
        ("GPU2\tNV18", "GPU9\tNV18"),
    ):
        assert worst(TOPO.read(whole.replace(old, new, 1), "t")) != "PASS", new
