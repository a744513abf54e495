#!/usr/bin/env bash
# Trains on a spot TPU pod slice, which it requests, and requests again when it is preempted.
#
#   export PROJECT=my-project ZONE=us-central1-a FILESTORE=10.0.0.2:/runs REPOSITORY=https://example.com/fork.git
#   launch/tpu_pod.sh
#   launch/tpu_pod.sh python experiments/exorl_at_ring.py --task walker_run --preset paper --distributed \
#     --output /mnt/runs/walker_run --data /mnt/runs/data
#
# It needs gcloud, logged in, and runs for as long as the training does; then it gives the slice back. The arguments
# are the command of each host. Environment: PROJECT and ZONE; FILESTORE, HOST:/SHARE of an NFS that all hosts mount
# at /mnt/runs, as the run must outlive the slice; REPOSITORY, what the hosts install; NAME, ACCELERATOR and RUNTIME
# of the slice; POLL_SECONDS between two looks at its state.

set -euo pipefail

: "${PROJECT:?the Google Cloud project}" "${ZONE:?the zone of the TPUs}" "${FILESTORE:?HOST:/SHARE of an NFS}"
: "${REPOSITORY:?address of the git repository to install}"
NAME=${NAME:-agentic-ring}
ACCELERATOR=${ACCELERATOR:-v5litepod-256}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
POLL_SECONDS=${POLL_SECONDS:-30}

if (($# == 0)); then
  set -- python experiments/exorl_at_ring.py --task walker_run --preset paper --distributed \
    --output /mnt/runs/walker_run --data /mnt/runs/data
fi
# The command runs in a shell on the hosts: its words stay words.
command=$(printf '%q ' "$@")

tpus() { gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"; }

on_all_hosts() { tpus tpu-vm ssh "$NAME" --worker=all --command="$1"; }

state() { tpus queued-resources describe "$NAME" --format='value(state.state)' 2>/dev/null || echo ABSENT; }

request_slice() {
  tpus queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$ACCELERATOR" \
    --runtime-version="$RUNTIME" --spot
}

install="set -e
sudo mkdir -p /mnt/runs
mountpoint -q /mnt/runs || sudo mount -t nfs '$FILESTORE' /mnt/runs
[ -d agentic_ring ] || git clone '$REPOSITORY' agentic_ring
cd agentic_ring
[ -d .venv ] || python3 -m venv .venv
.venv/bin/pip install -q -c constraints.txt -e '.[scripts,tpu]'"

while true; do
  case $(state) in
    ABSENT) request_slice ;;
    ACTIVE)
      status=0
      on_all_hosts "$install" || status=$?
      if ((status == 0)); then
        on_all_hosts "cd agentic_ring && PATH=\$PWD/.venv/bin:\$PATH $command" || status=$?
      fi
      # 1 and 2 are errors that come again, unless gcloud gives them because a host is gone.
      if ((status == 0)) || { ((status <= 2)) && [[ $(state) == ACTIVE ]]; }; then
        tpus queued-resources delete "$NAME" --force --quiet
        exit "$status"
      fi
      ;;
    SUSPENDED | SUSPENDING | FAILED) # preempted: a queued resource does not come back
      tpus queued-resources delete "$NAME" --force --quiet
      ;;
  esac
  sleep "$POLL_SECONDS"
done
