package main

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func streamChecks() []check {
	return []check{
		{name: "server stream: 1 000 small messages and a late error", run: lateError},
		{name: "server stream: each message arrives before the next is sent", run: notBuffered},
		{name: "server stream: headers arrive before the first message", run: headersFirst},
		{name: "client stream: 1 000 messages, half-closed", run: halfClosed},
		{name: "client stream: the driver ends it early", run: endedEarly},
		{name: "two-way stream: by turns, then half-closed", run: byTurns},
		{name: "two-way stream: idle for 3 s", run: idleStream},
		{name: "streams without a message", run: emptyStreams},
	}
}

// briefly gives a shorter deadline.
func (l *look) briefly(time time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(l.ctx, time)
}

func (l *look) stream(ctx context.Context, connection *grpc.ClientConn, method string) grpc.ClientStream {
	stream, err := connection.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/"+serviceName+"/"+method)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", method, err)) // the target listens, so only a defect of this program gets here
	}
	return stream
}

// drain reads to the end and prints what came.
func drain(stream grpc.ClientStream) string {
	count, sum := 0, crc32.NewIEEE()
	for {
		in := &bytesValue{}
		if err := stream.RecvMsg(in); err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			header, _ := stream.Header()
			return fmt.Sprintf("%d messages %08x, %s", count, sum.Sum32(), told(err, header, stream.Trailer()))
		}
		count++
		sum.Write(in.Value)
	}
}

func lateError(l *look) string {
	script := Script{Count: 1000, Reply: 20, Code: codes.FailedPrecondition, Message: []byte(odd), Details: []byte("d"),
		Trailer: [][2]string{{"t", "1"}, {"t", "2"}, {"t-bin", "\x01"}}}
	stream := l.stream(withScript(l.ctx, script), l.connect(), "Down")
	_ = stream.SendMsg(&bytesValue{}) // the stream's own error comes with RecvMsg
	_ = stream.CloseSend()
	answer := drain(stream)
	l.require(len(answer) > 40 && answer[:13] == "1000 messages", "%s", answer)
	return answer
}

// gateName is one for each side of each check.
func (l *look) gateName(check string) string { return fmt.Sprintf("%s %t", check, l.through) }

func notBuffered(l *look) string {
	const count = 200
	name := l.gateName("not buffered")
	stream := l.stream(withScript(l.ctx, Script{Count: count, Reply: 10, Gate: name}), l.connect(), "Down")
	_ = stream.SendMsg(&bytesValue{}) // as above
	_ = stream.CloseSend()
	gate := l.gate(name)
	for number := range count {
		gate <- struct{}{} // number+1 may be sent only now, when number has been read
		in := &bytesValue{}
		if err := stream.RecvMsg(in); err != nil || in.Value[0] != byte(number) {
			return fmt.Sprintf("message %d: %v", number, err)
		}
	}
	return drain(stream)
}

func headersFirst(l *look) string {
	connection := l.connect()
	script := Script{HeaderFirst: true, Header: [][2]string{{"h", "1"}}}
	stream := l.stream(withScript(l.ctx, script), connection, "Both")
	header, err := stream.Header() // nothing has been sent but headers
	_ = stream.CloseSend()
	return fmt.Sprintf("%s %v %s", sorted(header), err, drain(stream))
}

func halfClosed(l *look) string {
	stream := l.stream(withScript(l.ctx, Script{Trailer: [][2]string{{"t", "1"}}}), l.connect(), "Up")
	for number := range 1000 {
		if err := stream.SendMsg(wrapperspb.Bytes(pattern(number))); err != nil {
			return err.Error()
		}
	}
	_ = stream.CloseSend()
	in := &bytesValue{}
	err := stream.RecvMsg(in)
	return fmt.Sprintf("%s %v %s", in.Value, err, drain(stream))
}

func endedEarly(l *look) string {
	stream := l.stream(withScript(l.ctx, Script{Early: 10, Code: codes.ResourceExhausted, Message: []byte("full")}), l.connect(), "Up")
	var err error
	for range 100_000 {
		if err = stream.SendMsg(wrapperspb.Bytes(pattern(1000))); err != nil {
			break
		}
	}
	return fmt.Sprintf("%v, %s", errors.Is(err, io.EOF), drain(stream))
}

func byTurns(l *look) string {
	script := Script{Count: 300, Reply: 10, Sleep: 300 * time.Millisecond, Code: codes.Aborted, Message: []byte("late")}
	stream := l.stream(withScript(l.ctx, script), l.connect(), "Both")
	for number := range 200 {
		in := &bytesValue{}
		if err := stream.SendMsg(wrapperspb.Bytes([]byte{byte(number)})); err != nil {
			return err.Error()
		}
		if err := stream.RecvMsg(in); err != nil || in.Value[0] != byte(number) {
			return fmt.Sprintf("turn %d: %v", number, err)
		}
	}
	_ = stream.CloseSend() // the driver goes on
	return drain(stream)
}

func idleStream(l *look) string {
	stream := l.stream(withScript(l.ctx, Script{}), l.connect(), "Both")
	for range 2 {
		in := &bytesValue{}
		if err := stream.SendMsg(wrapperspb.Bytes([]byte("x"))); err != nil {
			return err.Error()
		}
		if err := stream.RecvMsg(in); err != nil {
			return err.Error()
		}
		time.Sleep(1500 * time.Millisecond)
	}
	_ = stream.CloseSend()
	return drain(stream)
}

func emptyStreams(l *look) string {
	connection, text := l.connect(), ""
	for _, method := range []string{"Up", "Both"} {
		stream := l.stream(withScript(l.ctx, Script{}), connection, method)
		_ = stream.CloseSend()
		text += drain(stream) + "\n"
	}
	stream := l.stream(withScript(l.ctx, Script{}), connection, "Down")
	_ = stream.CloseSend() // the server wants one message and gets none
	return text + status.Code(stream.RecvMsg(&bytesValue{})).String()
}
