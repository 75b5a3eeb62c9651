"""The options of a small generated log."""

from gem_core.data.generated import GeneratedConfig

# 1,100 users are two blocks; clicks are common, so that rare conversions occur too.
SMALL = GeneratedConfig(rows=11_000, users=1_100, ads=400, advertisers=60, seed=5, ctr=0.2)
