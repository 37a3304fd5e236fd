"""The recipes that ship with trtopt, one per file."""

from __future__ import annotations

from trtopt_recipes.align_channels import MisalignedChannels
from trtopt_recipes.aligned_heads import AlignedHeads
from trtopt_recipes.aligned_product import AlignedProduct
from trtopt_recipes.assigned_slices import AssignedSlices
from trtopt_recipes.average_pool_conv import AveragePoolConv
from trtopt_recipes.batch_first_attention import BatchFirstAttention
from trtopt_recipes.batch_norm import BatchNorm
from trtopt_recipes.broadcast_bias import BroadcastBias
from trtopt_recipes.capped_scores import CappedScores
from trtopt_recipes.cast_chain import CastChain
from trtopt_recipes.computed_reshape import ComputedReshape
from trtopt_recipes.constant_affine import ConstantAffine
from trtopt_recipes.constant_branch import ConstantBranch
from trtopt_recipes.constant_expression import ConstantExpression
from trtopt_recipes.conv_1d import Conv1d
from trtopt_recipes.conv_1x1_chain import Conv1x1Chain
from trtopt_recipes.cropped_conv import CroppedConv
from trtopt_recipes.dead_node import DeadNode
from trtopt_recipes.decomposed_gelu import DecomposedGelu
from trtopt_recipes.decomposed_layer_norm import DecomposedLayerNorm
from trtopt_recipes.duplicate_expression import DuplicateExpression
from trtopt_recipes.einsum import Einsum
from trtopt_recipes.expand_operand import ExpandedOperand
from trtopt_recipes.feature_order import FeatureOrder
from trtopt_recipes.gated_conv import GatedConv
from trtopt_recipes.gathered_rows import GatheredRows
from trtopt_recipes.gathered_weights import GatheredWeights
from trtopt_recipes.global_average_pool import GlobalAveragePool
from trtopt_recipes.group_norm import GroupNorm
from trtopt_recipes.identity import Identity
from trtopt_recipes.joined_convs import JoinedConvs
from trtopt_recipes.joined_sum import JoinedSum
from trtopt_recipes.late_selection import LateSelection
from trtopt_recipes.layer_scale import LayerScale
from trtopt_recipes.linear_as_conv import LinearAsConv
from trtopt_recipes.low_rank_weight import LowRankWeight
from trtopt_recipes.map_attention import MapAttention
from trtopt_recipes.mask_constant import MaskConstant
from trtopt_recipes.masked_rows import MaskedRows
from trtopt_recipes.merged_heads import MergedHeads
from trtopt_recipes.merged_projection import MergedProjection, RotatedProjection
from trtopt_recipes.merged_transpose import MergedTranspose
from trtopt_recipes.merged_windows import MergedWindows
from trtopt_recipes.mish import Mish
from trtopt_recipes.nan_guard import NanGuard
from trtopt_recipes.no_op import NoOp
from trtopt_recipes.normalized_qkv_bias import NormalizedQkvBias
from trtopt_recipes.normalized_scores import NormalizedScores
from trtopt_recipes.pad_conv import PadConv
from trtopt_recipes.padded_product import PaddedProduct
from trtopt_recipes.padded_vocabulary import PaddedVocabulary
from trtopt_recipes.prelu import Prelu
from trtopt_recipes.qkv_bias import QkvBias
from trtopt_recipes.rank_4_linear import Rank4Linear
from trtopt_recipes.recurrent_backward import BackwardRecurrence
from trtopt_recipes.recurrent_stacked import StackedRecurrence
from trtopt_recipes.recurrent_static import StaticRecurrence
from trtopt_recipes.repvgg_branches import RepvggBranches
from trtopt_recipes.reshape_chain import ReshapeChain
from trtopt_recipes.residual_activation import ResidualActivation
from trtopt_recipes.resize_conv import ResizeConv
from trtopt_recipes.scaled_keys import ScaledKeys
from trtopt_recipes.scaled_residual import ScaledResidual
from trtopt_recipes.selu import Selu
from trtopt_recipes.settled_selection import SettledSelection
from trtopt_recipes.shared_indices import SharedIndices
from trtopt_recipes.shifted_scores import ShiftedScores
from trtopt_recipes.short_reduction import ShortReduction
from trtopt_recipes.sigmoid_after_product import SigmoidAfterProduct
from trtopt_recipes.softplus import Softplus
from trtopt_recipes.split_after_conv import SplitAfterConv
from trtopt_recipes.strided_stem import StridedStem
from trtopt_recipes.token_batch_norm import TokenBatchNorm
from trtopt_recipes.token_mixing import TokenMixing
from trtopt_recipes.transpose_pair import TransposePair
from trtopt_recipes.transpose_push import TransposePush
from trtopt_recipes.window_residual import WindowResidual

PACK = (
    Identity(),
    NoOp(),
    CastChain(),
    Einsum(),
    AssignedSlices(),
    MergedHeads(),
    MergedTranspose(),
    TransposePair(),
    ReshapeChain(),
    NanGuard(),
    ShiftedScores(),
    DuplicateExpression(),
    DeadNode(),
    ConstantExpression(),
    ConstantBranch(),
    SettledSelection(),
    ComputedReshape(),
    ExpandedOperand(),
    MergedWindows(),
    FeatureOrder(),
    TokenBatchNorm(),
    TransposePush(),
    BatchNorm(),
    DecomposedGelu(),
    ConstantAffine(),
    PadConv(),
    CroppedConv(),
    LayerScale(),
    DecomposedLayerNorm(),
    GroupNorm(),
    MaskConstant(),
    LowRankWeight(),
    MergedProjection(),
    RotatedProjection(),
    GatheredRows(),
    GatheredWeights(),
    SharedIndices(),
    AlignedHeads(),
    Prelu(),
    Selu(),
    Mish(),
    Softplus(),
    MaskedRows(),
    NormalizedScores(),
    ScaledKeys(),
    CappedScores(),
    BroadcastBias(),
    WindowResidual(),
    MapAttention(),
    NormalizedQkvBias(),
    QkvBias(),
    BatchFirstAttention(),
    Rank4Linear(),
    LinearAsConv(),
    TokenMixing(),
    LateSelection(),
    SigmoidAfterProduct(),
    StackedRecurrence(),
    StaticRecurrence(),
    BackwardRecurrence(),
    ResizeConv(),
    AveragePoolConv(),
    ShortReduction(),
    GlobalAveragePool(),
    JoinedConvs(),
    JoinedSum(),
    PaddedProduct(),
    RepvggBranches(),
    Conv1x1Chain(),
    GatedConv(),
    ScaledResidual(),
    SplitAfterConv(),
    StridedStem(),
    Conv1d(),
    ResidualActivation(),
    MisalignedChannels(),
    AlignedProduct(),
    PaddedVocabulary(),
)
"""In canonical order: cheap removals first, so that later recipes see fewer nodes."""
