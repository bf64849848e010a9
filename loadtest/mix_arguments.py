"""The flags that describe a synthetic mix, the same for each command that has them."""

from __future__ import annotations

import argparse

from loadtest.synthetic import LengthRange, Mix, parse_priorities


def add_mix_arguments(group: argparse._ArgumentGroup) -> None:
    """What `mix_of` reads."""
    # Ranges stay text until then: what is wrong with one is then one line, without the usage.
    group.add_argument("--mix-short", default="64-512", help="tokens of short prompts")
    group.add_argument("--mix-long", default="2048-8192", help="tokens of long prompts")
    group.add_argument("--mix-long-share", type=float, default=0.1, help="of all prompts")
    group.add_argument("--mix-output", default="16-256", help="tokens of answers")
    group.add_argument("--mix-prefixes", type=int, default=0, help="different shared beginnings")
    group.add_argument("--mix-prefix-blocks", type=int, default=1, help="of 512 tokens, each")
    group.add_argument("--mix-prefix-share", type=float, default=1.0, help="of prompts with one")
    group.add_argument("--mix-priorities", default="0:1", help="weights, as in 0:1,1:4")


def mix_of(arguments: argparse.Namespace) -> Mix:
    """The mix that the flags describe.

    Raises:
        TraceError: a value that makes none.
    """
    return Mix(
        short=LengthRange.parse(arguments.mix_short),
        long=LengthRange.parse(arguments.mix_long),
        long_share=arguments.mix_long_share,
        output=LengthRange.parse(arguments.mix_output),
        num_prefixes=arguments.mix_prefixes,
        prefix_blocks=arguments.mix_prefix_blocks,
        prefix_share=arguments.mix_prefix_share,
        priorities=parse_priorities(arguments.mix_priorities),
    )
