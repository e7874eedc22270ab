"""How kernels cut their work: sizes of tiles, stages on their way, and the shared memory that these take."""

from __future__ import annotations

from dataclasses import dataclass

HOPPER_SHARED_BYTES = 226 * 1024  # that a block may ask for; 1 KB is for what the kernel declares


@dataclass(frozen=True)
class HopperTile:
    """How w4_wgmma_lora works: tokens of a tile, tokens and blocks of 64 columns of a warpgroup, pipeline stages."""

    tokens: int
    block: int
    blocks: int
    stages: int
    token_scale: bool
    threads: int
    shared_bytes: int


def hopper_tile(wide: bool, token_scale: bool, out_bytes: int) -> HopperTile:
    """One scale a token or a group; what registers and shared memory hold. Sizes are the fastest ones on an H200."""
    tokens, block, blocks = (64, 32, 1) if not wide else (192, 96, 1) if token_scale else (192, 64, 2)
    warpgroups = tokens // block * (2 // blocks)  # that compute
    stage = tokens * 128 + 128 * 128 + 512 + (0 if token_scale else tokens * 8)
    rows = warpgroups * block * (64 * out_bytes + 16)  # of y on their way out
    stages = min(5, (HOPPER_SHARED_BYTES - rows) // stage)
    return HopperTile(tokens, block, blocks, stages, token_scale, 128 * (warpgroups + 1), stages * stage + rows)


@dataclass(frozen=True)
class MediumTile:
    """How w4a4_medium_m works: panels of 16 tokens, blocks of a cluster, warps."""

    panels: int
    cluster: int
    warps: int

    @property
    def stages(self) -> int:
        return min(8, {1: 98, 2: 220}[self.cluster] * 1024 // self._stage_bytes)  # of shared memory for a block

    @property
    def ring_bytes(self) -> int:
        """Of shared memory, for the stages and, in their place, for sums."""
        pairs = self.panels * 8
        return max(self.stages * self._stage_bytes, (self.warps * 36 + 32 + 36) * pairs * 8)

    @property
    def shared_bytes(self) -> int:
        return self.ring_bytes + 16 * self.stages  # and barriers

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def _stage_bytes(self) -> int:
        return self.warps * 1088 + self.warps // self.cluster * self.panels * 576


def medium_tile(m: int, cluster: int) -> MediumTile:
    """For m tokens and blocks of a cluster, 2 on Hopper, else 1.

    In a cluster 16 warps were faster than 8; of three panels they would spill registers.
    """
    panels = -(-m // 16)
    return MediumTile(panels, cluster, 16 if cluster == 2 and panels != 3 else 8)


_STAGED_GROUPS = 128  # SCALED_GROUPS of weight_only.cu, which checks that its shared memory is enough


@dataclass(frozen=True)
class WeightOnlyTile:
    """How weight_only works: bits of a code, rows of the weight and tokens of a block, its warps, stages on their way.

    turned  whether the lanes of a row share words, for groups below 128 and for many tokens
    """

    bits: int
    rows: int
    tokens: int
    warps: int
    stages: int
    turned: bool

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * self.rows * self.warps * 64
        scales = self.rows * (_STAGED_GROUPS + 1) * 4 if self.bits == 4 else 0
        sums = self.warps * self.tokens * (self.rows + 4) * 4
        return max(ring + scales, sums)


def weight_only_tile(bits: int, m: int, group: int) -> WeightOnlyTile:
    """For m tokens; of 8 bits the group does not matter. Sizes are those that were fastest on an H200."""
    if m > 8:
        return WeightOnlyTile(bits, 32, 32, 8 if bits == 4 else 16, 2, bits == 4)
    return WeightOnlyTile(4, 32, 8, 8, 3, group < 128) if bits == 4 else WeightOnlyTile(8, 16, 8, 16, 2, False)
