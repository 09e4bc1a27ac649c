#!/bin/bash
# Runs a command in a guest: Linux 6.1 in user mode, whose only control groups are of version 2.
#
#   apt-get install user-mode-linux
#   tests/in_guest.sh .venv/bin/python -m pytest -m 'fault or soak' tests/faults/test_memory_limit.py
#
# Tests that swap do it to a file of its /tmp, where no other program of this machine swaps.
#
# As root, on x86-64. The guest has this machine's files, one core, 5 GB and a disk in place of /tmp;
# it is several times slower than the machine. Its command's output comes at the end.
set -eu
if [ "$$" != 1 ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  truncate -s 6G "$work/disk"
  printf '%q ' "$@" >"$work/command"
  pwd >"$work/folder"
  # Its memory is a file that has no name; /dev/shm is where files are memory.
  TMPDIR=/dev/shm linux.uml mem=5G root=none rootfstype=hostfs rootflags=/ rw ubdb="$work/disk" \
    init="$(realpath "$0")" guest_work="$work" con=null con0=null,fd:1 >"$work/boot" 2>&1 || true
  cat "$work/output" || cat "$work/boot"
  exit "$(cat "$work/code")"
fi
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
ln -sf /proc/self/fd /dev/fd
mount -t cgroup2 cgroup2 /sys/fs/cgroup
work=$guest_work
# Before /tmp is another folder, in which the files of the command are.
exec 8>"$work/output" 9>"$work/code"
folder=$(cat "$work/folder")
command=$(cat "$work/command")
# With a swap file alone, workers that read their swapped pages were ended here three times, by SIGKILL
# and without a word in the kernel's log; why is not known. With compressed memory (zswap) none was.
echo 1 >/sys/module/zswap/parameters/enabled
mkfs.ext4 -q -F /dev/ubdb
mount /dev/ubdb /tmp
mount -t tmpfs tmpfs /run
ip link set lo up
hostname guest
cd "$folder"
set +e
bash -c "$command" >&8 2>&1
echo $? >&9
sync
echo o >/proc/sysrq-trigger
sleep 5
