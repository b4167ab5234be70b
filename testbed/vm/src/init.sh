#!/bin/sh
# The first process of the VM: prepares the system, then runs what the host sends until it hangs up.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
ln -s /proc/self/fd /dev/fd
# /tmp stays on the initial file system: what the host injected from there must not be hidden.
mkdir -p /dev/pts /dev/shm /tmp
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
chmod 1777 /tmp /dev/shm
modprobe -a virtio_pci virtio_console virtio_net virtio_rng
ip link set lo up
for port in /sys/class/virtio-ports/*; do
	read -r name <"$port/name"
	ln -s "/dev/${port##*/}" "/run/port-$name"
done
# A port can be open only once: everybody below shares these descriptors.
exec 4</run/port-control 5>/run/port-status 6</run/port-input 7>/run/port-output 8>/run/port-error
echo ready >&5
# One request is one line: what ends each output stream, and the script to run in base64.
while read -r mark script <&4; do
	echo "$script" | base64 -d >/run/request
	setsid sh /run/request </dev/null >&7 2>&8 4<&- 5>&-
	status=$?
	echo "$mark" >&7
	echo "$mark" >&8
	echo "$status" >&5
done
echo o >/proc/sysrq-trigger
sleep 60
