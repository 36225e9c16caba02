"""Hashes of LongBench v1's 34 official files.

The hash is git's blob hash: SHA-1 over "blob <size>", a zero byte and the content with line feeds as line ends (copies
with Windows line ends count as the same file). `git hash-object FILE` prints it.

Source: the repository THUDM/LongBench on the Hugging Face hub, data.zip.
"""

from __future__ import annotations

OFFICIAL_BLOBS: dict[str, str] = {
    "2wikimqa": "4973a61d19d8def6ecc20b92dba0a472e65a825f",
    "2wikimqa_e": "ad9c20133e3a88ab0fcfcc2c5a6492a6df3e89b7",
    "dureader": "6102bef95778c7e204b2d01c2d7b3843ccf8d8f1",
    "gov_report": "6f935674346a6bfa9027950c6851bd81a0a5cda5",
    "gov_report_e": "f1cbe037f78e1dcd17a79cefca009e58e98cba27",
    "hotpotqa": "7f44e50b1a7142585db1fdca0324fd4554cd9c98",
    "hotpotqa_e": "92f0dfba980309eb4d7975a42d422a5098132d1c",
    "lcc": "6d1f0eb98474cb686901cee7e01687d705bc593e",
    "lcc_e": "970d46bda5e170dc987c4d4aa7a603edea9c2a3c",
    "lsht": "9827c5f50fa87c88e16b9f06dd5a18ab9489d52a",
    "multi_news": "83ed3cc49ebbd880d0512d6dfdbad82b6fbf3a71",
    "multi_news_e": "4a65970dd190cb1b37c004fcade17e6dc68e4113",
    "multifieldqa_en": "a219154fb7add8fda8fa4d194e6cf445632ee5fa",
    "multifieldqa_en_e": "71ab54bd1e768b8ac7345e1815b04e4066f84eab",
    "multifieldqa_zh": "c286dc4b15d4b04745f2acfde984f578dd32f5d3",
    "musique": "fc11f706342894d29132f59810882bd99554fa98",
    "narrativeqa": "5446d6580c0fbabc4902baae7fc5d873a5063384",
    "passage_count": "7eb4be842c1c2242ddfe4748e3fb8e40a8d49421",
    "passage_count_e": "b8c8103fc49a40627652f4f5473b14efb382d24a",
    "passage_retrieval_en": "a91f7768b3f836e7aa387ac90945fcc85a0548f7",
    "passage_retrieval_en_e": "a0d178dae58bc849ca098d5d197793fee1d00580",
    "passage_retrieval_zh": "ff1cf3cdfe4b757d79993b04d6bcaba9f1550356",
    "qasper": "b1a8362e1ca5e8c8bc585240af28ff356353976e",
    "qasper_e": "31d3b9fe9e5ed5fab2c2ac53b3f1f5f9f4ab6a20",
    "qmsum": "8efa254509e031d38b5eec2ca8b7e4b1c91707b8",
    "repobench-p": "28d5076b0d4c37a551a2715226808a39174f2c15",
    "repobench-p_e": "1d8bfd7e3ee9cedf741adf2630074306a7a54a35",
    "samsum": "0e173e1fc54651179920ca0feb96a4c54186e85d",
    "samsum_e": "4c6d2e30d90f1462ce64bdbf25c609386bbdefb3",
    "trec": "e37b9a5219b86927df1393a2779b0082ae2b7436",
    "trec_e": "985ae414eeb0337e235592aa3a8e2d9d3d55f3e6",
    "triviaqa": "4c65d9b801d4f8cb1a13943f27f787098c4f412c",
    "triviaqa_e": "194baef10909d002e6c233715bef6b2dfcb99486",
    "vcsum": "db91aa53f5e579c0a0aee8e398596b419a316481",
}
"""File name without suffix → its hash; `_e` files are LongBench-E's."""
