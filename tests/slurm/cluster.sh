#!/usr/bin/env bash
# A real one-machine Slurm for tests: its own configuration, state, ports and munge socket.
#
#   tests/slurm/cluster.sh start DIR [nodes=2] [account=def-ann] [grace=60]
#                      idempotent; then: export SLURM_CONF=DIR/slurm.conf
#                      account: accounts are enforced, and this one is yours
#                      grace: the partition `urgent` preempts `all`, whose jobs get so many seconds
#                      array, jobs, age: MaxArraySize, MaxJobCount, MinJobAge
#                      name: the cluster's name; beside: the folder of a Slurm with an account,
#                      whose slurmdbd and munge this one shares, so that --clusters finds both
#   tests/slurm/cluster.sh restart-slurmd DIR  what an administrator does under running jobs
#   tests/slurm/cluster.sh kill-slurmd DIR NODE  what a crash does: slurmd alone is gone …
#   tests/slurm/cluster.sh start-slurmd DIR    … and those that are gone are back
#   tests/slurm/cluster.sh slurmd-timeout DIR SECONDS  after which a node that is silent is down
#   tests/slurm/cluster.sh stop-slurmctld DIR  an outage of the controller …
#   tests/slurm/cluster.sh start-slurmctld DIR … and its end
#   tests/slurm/cluster.sh stop DIR            ends its jobs and its own daemons, nothing else
#
# Needs root, and: apt-get install slurm-wlm munge; for an account also: slurmdbd mariadb-server
set -euo pipefail
action=${1:?see the head of this file} dir=${2:?a folder for state and logs} nodes=1 account="" grace=""
name=test beside=""
array=2001 jobs=20000 age=300
[[ $action != start ]] || for option in "${@:3}"; do declare "$option"; done
mkdir -p "$dir" && dir=$(cd "$dir" && pwd)
export SLURM_CONF=$dir/slurm.conf

say() { echo "cluster: $*"; }
fail() { say "$*" >&2; exit 1; }
alive() { [[ -s $1 ]] && kill -0 "$(<"$1")" 2>/dev/null; }
free_port() {
    # Below the kernel's ephemeral ones, which any program may take before the daemon does.
    python3 - <<'END'
import contextlib, random, socket
while True:
    port = random.randrange(22000, 32000)
    with contextlib.suppress(OSError), socket.socket() as s:
        s.bind(("", port))
        print(port)
        break
END
}

start_slurmd() {
    local i
    for i in $(seq 1 "$(grep -c '^NodeName=' "$SLURM_CONF")"); do
        alive "$dir/slurmd.n$i.pid" || slurmd -N "n$i" -L "$dir/slurmd.n$i.log"
    done
}

stop_slurmd() {
    local file pid i
    for file in "$dir"/slurmd.n*.pid; do
        alive "$file" || continue
        pid=$(<"$file")
        kill "$pid"
        for i in $(seq 300); do
            kill -0 "$pid" 2>/dev/null || continue 2
            sleep 0.1
        done
        say "slurmd $pid does not end, and is killed" >&2 # it waits for a job that it was told to end
        kill -9 "$pid"
    done
}

stop_slurmctld() {
    local pid
    pid=$(<"$dir/slurmctld.pid")
    kill "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
}

until_() { # until_ COMMAND…: try for a while
    local i
    for i in $(seq 50); do timeout 20 "$@" >/dev/null 2>&1 && return; sleep 0.5; done
    fail "gave up on: $*; logs in $dir"
}

start_database() { # a private MariaDB on a port of its own, for slurmdbd, on another
    local port dbd
    port=$(free_port) dbd=$(free_port)
    mariadb-install-db --no-defaults --user=root --datadir="$dir/db" \
        --auth-root-authentication-method=normal --skip-test-db >/dev/null
    mariadbd --no-defaults --user=root --datadir="$dir/db" --bind-address=127.0.0.1 --port="$port" \
        --socket="$dir/db.sock" --pid-file="$dir/db.pid" --log-error="$dir/db.log" \
        --innodb-lock-wait-timeout=900 </dev/null >/dev/null 2>&1 &
    until_ mariadb --socket="$dir/db.sock" --execute \
        "create or replace user slurm@localhost identified by 'none'; grant all on *.* to slurm@localhost"
    (
        umask 077
        cat >"$dir/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
DbdHost=$(hostname -s)
DbdAddr=127.0.0.1
DbdPort=$dbd
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$port
StorageUser=slurm
StoragePass=none
PidFile=$dir/slurmdbd.pid
LogFile=$dir/slurmdbd.log
END
    )
    cat <<END
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$dbd
AccountingStoragePass=$dir/munge/socket
AccountingStorageEnforce=associations,limits
END
}

case $action in
start)
    [[ $(id -u) == 0 ]] || fail "starting slurmd needs root"
    for tool in slurmctld slurmd munged sbatch; do
        command -v $tool >/dev/null || fail "$tool is missing: apt-get install slurm-wlm munge"
    done
    if alive "$dir/slurmctld.pid" && sinfo -h >/dev/null 2>&1; then
        say "already running in $dir"
        exit 0
    fi
    mkdir -p "$dir"/{state,spool,munge}
    for i in $(seq 1 "$nodes"); do mkdir -p "$dir/spool/n$i"; done
    munge=${beside:-$dir}/munge
    if ! alive "$munge/munged.pid"; then
        [[ -s $dir/munge/key ]] || (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
        # --force: the folder may lie below a world-writable /tmp, which is fine for a test.
        munged --force --socket="$dir/munge/socket" --key-file="$dir/munge/key" \
            --pid-file="$dir/munge/munged.pid" --log-file="$dir/munge/log" \
            --seed-file="$dir/munge/seed" 2>/dev/null
    fi
    accounting=AccountingStorageType=accounting_storage/none
    if [[ -n $beside ]]; then
        accounting=$(grep '^AccountingStorage' "$beside/slurm.conf")
    elif [[ -n $account ]]; then
        accounting=$(start_database)
    fi
    # Slurms beside each other on this machine, one for each worker of pytest-xdist, count their jobs
    # from different numbers: a job's number decides where the search for its port begins.
    worker=${PYTEST_XDIST_WORKER:-gw0}
    cores=$(nproc --all) memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
    {
        cat <<END
ClusterName=$name
FirstJobId=$((1 + 1000 * ${worker#gw}))
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$munge/socket,cred_expire=15
CryptoType=crypto/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
$accounting
MpiDefault=none
ReturnToService=2
MinJobAge=$age
MaxArraySize=$array
MaxJobCount=$jobs
KillWait=30
SlurmdTimeout=300
SchedulerParameters=sched_interval=2,sched_min_interval=100000,batch_sched_delay=0,bf_interval=5,max_rpc_cnt=0,default_queue_depth=500
DefMemPerCPU=512
END
        for i in $(seq 1 "$nodes"); do
            echo "NodeName=n$i NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$(free_port)" \
                "CPUs=$cores RealMemory=$memory State=UNKNOWN"
        done
        all="Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO"
        echo "PartitionName=all $all Default=YES PriorityTier=1 ${grace:+GraceTime=$grace}"
        if [[ -n $grace ]]; then
            echo "PartitionName=urgent $all PriorityTier=9 PreemptMode=OFF"
            echo "PreemptType=preempt/partition_prio"
            echo "PreemptMode=REQUEUE"
        fi
    } >"$SLURM_CONF"
    if [[ -n $account ]]; then
        [[ -n $beside ]] || slurmdbd
        until_ sacctmgr --noheader show cluster
        sacctmgr --immediate --quiet add cluster "$name" || true
        sacctmgr --immediate --quiet add account "$account" cluster="$name"
        sacctmgr --immediate --quiet add user root account="$account" cluster="$name"
    fi
    slurmctld -c -L "$dir/slurmctld.log"
    start_slurmd
    for _ in $(seq 600); do
        if [[ $(sinfo -h -t idle -o %D 2>/dev/null) == "$nodes" ]]; then
            say "$(scontrol version), $nodes node(s); export SLURM_CONF=$SLURM_CONF"
            exit 0
        fi
        sleep 0.2
    done
    tail -n 5 "$dir"/*.log >&2
    fail "the nodes did not become idle; logs in $dir"
    ;;
restart-slurmd)
    stop_slurmd
    start_slurmd
    ;;
kill-slurmd) kill -9 "$(<"$dir/slurmd.${3:?which node}.pid")" ;;
start-slurmd) start_slurmd ;;
slurmd-timeout)
    sed -i "s/^SlurmdTimeout=.*/SlurmdTimeout=${3:?how many seconds}/" "$SLURM_CONF"
    scontrol reconfigure
    ;;
stop-slurmctld) stop_slurmctld ;;
start-slurmctld) slurmctld -L "$dir/slurmctld.log" && until_ sinfo ;;
stop)
    if alive "$dir/slurmctld.pid"; then
        scancel --user=root 2>/dev/null || true
        for _ in $(seq 300); do
            left=$(squeue -h 2>/dev/null) && [[ -z $left ]] && break
            sleep 0.2
        done
        kill "$(<"$dir/slurmctld.pid")"
    fi
    stop_slurmd
    for file in "$dir"/slurmdbd.pid "$dir"/db.pid; do
        if alive "$file"; then kill "$(<"$file")"; fi
    done
    if alive "$dir/munge/munged.pid"; then kill "$(<"$dir/munge/munged.pid")"; fi
    say "stopped"
    ;;
*) fail "unknown action $action" ;;
esac
