import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;

/** Post a body three times with one client as the JDK makes it, and print the answers. */
class Ask {
    public static void main(String[] words) throws Exception {
        var client = HttpClient.newHttpClient();
        for (int i = 0; i < 3; i++) {
            var body = words[2].equals("stream")
                ? BodyPublishers.ofInputStream(
                    () -> new ByteArrayInputStream(words[1].getBytes(StandardCharsets.UTF_8)))
                : BodyPublishers.ofString(words[1]);
            var request = HttpRequest.newBuilder(URI.create(words[0]))
                .header("content-type", "application/json").POST(body).build();
            var answer = client.send(request, BodyHandlers.ofString());
            if (answer.statusCode() != 200) {
                throw new IllegalStateException(answer.statusCode() + " " + answer.body());
            }
            System.out.println(answer.body());
        }
    }
}
