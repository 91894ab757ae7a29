#!/bin/sh
# SLURM, which the slow tests of this folder start on this machine. On Debian or Ubuntu, as root.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends slurm-wlm
